"""Invoices, their lines and the states they pass through."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum

from invoicing.money import Money

#: Days between the invoice date and the due date when the supplier names none.
DEFAULT_TERMS_DAYS = 45

#: An invoice with more lines than this is refused by the parser.
MAX_LINES = 500


class InvoiceState(Enum):
    """Where an invoice stands. A posted invoice can no longer be rejected."""

    RECEIVED = "received"
    PARSED = "parsed"
    APPROVED = "approved"
    POSTED = "posted"
    PAID = "paid"
    REJECTED = "rejected"


TRANSITIONS: dict[InvoiceState, frozenset[InvoiceState]] = {
    InvoiceState.RECEIVED: frozenset({InvoiceState.PARSED, InvoiceState.REJECTED}),
    InvoiceState.PARSED: frozenset({InvoiceState.APPROVED, InvoiceState.REJECTED}),
    InvoiceState.APPROVED: frozenset({InvoiceState.POSTED, InvoiceState.REJECTED}),
    InvoiceState.POSTED: frozenset({InvoiceState.PAID}),
    InvoiceState.PAID: frozenset(),
    InvoiceState.REJECTED: frozenset(),
}


class IllegalTransition(ValueError):
    """An invoice was asked to move to a state it cannot reach from here."""


@dataclass(frozen=True)
class Line:
    """One position: a quantity of something at a unit price and a tax rate."""

    text: str
    quantity: Decimal
    unit_price: Money
    tax_rate: Decimal

    @property
    def net(self) -> Money:
        """Quantity times unit price, rounded half-up to a minor unit."""
        return self.unit_price.times(self.quantity)


@dataclass
class Invoice:
    """A supplier's invoice. ``key`` identifies it in every request."""

    supplier_id: str
    number: str
    issued: date
    lines: tuple[Line, ...]
    terms_days: int = DEFAULT_TERMS_DAYS
    state: InvoiceState = InvoiceState.RECEIVED

    @property
    def key(self) -> str:
        """Supplier and number joined by a colon; numbers are unique per supplier."""
        return f"{self.supplier_id}:{self.number}"

    @property
    def due(self) -> date:
        """Due date; one that falls on a weekend moves to the next Monday."""
        day = self.issued + timedelta(days=self.terms_days)
        if day.weekday() >= 5:
            day += timedelta(days=7 - day.weekday())
        return day

    def move_to(self, target: InvoiceState) -> None:
        """Change the state, or raise ``IllegalTransition``."""
        if target not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.key}: {self.state.value} -> {target.value}")
        self.state = target
