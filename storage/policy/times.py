"""Times as people write them: "every working day at 07:45 Europe/Berlin" into a cron line, "2h" into seconds."""

from __future__ import annotations

import re

from storage.errors import UserError

WEEKDAYS = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")  # as cron counts them
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
EXAMPLES = '"every working day at 07:45", "every day at 22:00" or "every monday and friday at 06:30"'

_PLAIN = re.compile(r"every (?P<days>[a-z, ]+?) at (?P<hour>\d{1,2}):(?P<minute>\d\d)(?: (?P<zone>\S+))?", re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,9})\s*([smhdw])")
_AGE = re.compile(r"([<>])\s*(.+)")


def plain_schedule(text: str) -> tuple[str, str | None]:
    """The cron line of `every DAYS at HH:MM [ZONE]`, and the zone if one is named. Raises UserError.

    DAYS: `day`, `working day` (Monday to Friday; holidays are not known), or weekdays joined by commas or `and`."""
    match = _PLAIN.fullmatch(" ".join(text.split()))
    if match is None:
        raise UserError(f"{text!r} is no time: write {EXAMPLES}, or a cron line")
    hour, minute = int(match["hour"]), int(match["minute"])
    if hour > 23 or minute > 59:
        raise UserError(f"{match['hour']}:{match['minute']} is no time of day: use 00:00 to 23:59")
    return f"{minute} {hour} * * {_days(match['days'].lower())}", match["zone"]


def _days(text: str) -> str:
    if text == "day":
        return "*"
    if text in ("working day", "weekday"):
        return "1-5"
    names = [name for name in re.split(r"[, ]+(?:and )?| and ", text) if name and name != "and"]
    unknown = [name for name in names if name not in WEEKDAYS]
    if unknown or not names:
        raise UserError(f"{text!r} names no days: use day, working day, or weekdays such as monday and friday")
    return ",".join(str(number) for number in sorted({WEEKDAYS.index(name) for name in names}))


def duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `2h`, `7d` or `2w`. Raises UserError."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or not int(match[1]):
        raise UserError(f"{text!r} is no length of time: write a number and s, m, h, d or w, such as 2h")
    return float(int(match[1]) * SECONDS[match[2]])


def comparison(text: str) -> tuple[str, float]:
    """`< 30d` or `> 2h` as sign and seconds. Raises UserError."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UserError(f'{text!r} compares nothing: write "< 30d" or "> 30d"')
    return match[1], duration(match[2])
