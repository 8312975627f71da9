"""Decides which reminder an overdue invoice gets.

There are three levels. The first is friendly and free; the second and third
charge a fee. After the third the case goes to the collections desk and this
module stays silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from invoicing.money import Money

#: Invoices below this open amount are never dunned.
SMALLEST_DUNNED = Money(1000, "EUR")

#: Days between two reminders, so that a payment in transit can arrive.
MIN_GAP_DAYS = 7


@dataclass(frozen=True)
class Reminder:
    """One level of reminder: sent from ``after_days`` past due, at ``fee``."""

    level: int
    after_days: int
    fee: Money


LEVELS = (
    Reminder(1, 5, Money(0, "EUR")),
    Reminder(2, 20, Money(750, "EUR")),
    Reminder(3, 35, Money(1500, "EUR")),
)


def next_reminder(
    due: date,
    today: date,
    open_amount: Money,
    last_level: int = 0,
    last_sent: date | None = None,
) -> Reminder | None:
    """Return the reminder to send today, or ``None``.

    Levels are never skipped: an invoice that is 40 days overdue and was never
    reminded gets the first level, not the third.
    """
    if (open_amount - SMALLEST_DUNNED).minor < 0:
        return None
    if last_level >= len(LEVELS):
        return None
    if last_sent is not None and (today - last_sent).days < MIN_GAP_DAYS:
        return None
    candidate = LEVELS[last_level]
    if (today - due).days < candidate.after_days:
        return None
    return candidate
