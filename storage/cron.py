"""When a cron line comes due, by the clocks of a named time zone."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from storage.errors import UserError


def next_due(cron: str, timezone: str, after: float) -> float:
    """The first time after `after` that the cron line names, by the clocks of the time zone. Raises
    UserError.

    Where clocks go forward, a time of day that is left out fires as they do; where they go back, one fires
    once."""
    try:
        zone = ZoneInfo(timezone)
    except (KeyError, ValueError, OSError) as error:
        raise UserError(f"there is no time zone {timezone!r}; use a name such as Europe/Berlin") from error
    if len(cron.split()) != 5:
        raise UserError(
            f"the schedule {cron!r} needs five fields: minute hour day-of-month month day-of-week"
        )
    try:
        due: datetime = next(CronSim(cron, datetime.fromtimestamp(after, UTC).astimezone(zone)))
    except CronSimError as error:
        raise UserError(f"the schedule {cron!r} cannot be read: {error}") from error
    except StopIteration as error:
        raise UserError(f"the schedule {cron!r} never comes due") from error
    return due.timestamp()
