"""Times as people write them, by the clocks of a place."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from storage.cron import next_due
from storage.errors import UserError
from storage.policy.times import comparison, duration, plain_schedule

BERLIN = "Europe/Berlin"


def at(text: str, zone: str = BERLIN, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def following(text: str, after: float, count: int = 1, zone: str = BERLIN) -> list[str]:
    """The next times of a plain schedule, by the clocks of the zone."""
    cron, _ = plain_schedule(text)
    found = []
    for _ in range(count):
        after = next_due(cron, zone, after)
        found.append(datetime.fromtimestamp(after, ZoneInfo(zone)).strftime("%a %d %H:%M %z"))
    return found


@pytest.mark.parametrize(
    ("text", "cron"),
    [
        ("every day at 22:00", "0 22 * * *"),
        ("every working day at 07:45", "45 7 * * 1-5"),
        ("every weekday at 7:05", "5 7 * * 1-5"),
        ("every monday at 00:00", "0 0 * * 1"),
        ("Every Sunday and Friday at 23:59", "59 23 * * 0,5"),
        ("every monday, wednesday and friday at 06:30", "30 6 * * 1,3,5"),
        ("every  tuesday,thursday   at 06:30", "30 6 * * 2,4"),
    ],
)
def test_plain_english_becomes_cron(text: str, cron: str) -> None:
    assert plain_schedule(text) == (cron, None)


def test_a_zone_may_follow() -> None:
    assert plain_schedule("every day at 07:45 America/New_York")[1] == "America/New_York"


@pytest.mark.parametrize(
    "text",
    ["", "at 07:45", "every day", "every day at 7", "every day at 7:5", "every day at 25:00", "every day at 07:60",
     "every someday at 07:00", "every day at 07:45 Europe/Berlin please", "every and at 07:45", "every monday tuesdy at 07:45"],
)  # fmt: skip
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        plain_schedule(text)


def test_working_days_skip_the_weekend() -> None:
    friday = at("2026-11-27 08:00")
    assert following("every working day at 07:45", friday, 2) == ["Mon 30 07:45 +0100", "Tue 01 07:45 +0100"]


def test_the_wall_clock_counts_when_summer_begins_and_ends() -> None:
    assert following("every day at 07:45", at("2026-03-28 08:00"), 2) == ["Sun 29 07:45 +0200", "Mon 30 07:45 +0200"]
    assert following("every day at 07:45", at("2026-10-24 08:00"), 2) == ["Sun 25 07:45 +0100", "Mon 26 07:45 +0100"]


def test_an_hour_that_is_left_out_still_fires_once() -> None:
    fired = following("every day at 02:30", at("2026-03-28 03:00"), 2)
    assert fired[0].startswith("Sun 29 03:")
    assert fired[1] == "Mon 30 02:30 +0200"


def test_an_hour_that_comes_twice_fires_once() -> None:
    fired = following("every day at 02:30", at("2026-10-24 03:00"), 2)
    assert [time[:6] for time in fired] == ["Sun 25", "Mon 26"]


def test_the_same_words_are_other_moments_elsewhere() -> None:
    cron, _ = plain_schedule("every day at 07:45")
    start = at("2026-11-27 00:00", "UTC")
    hours = [(next_due(cron, zone, start) - start) / 3600 for zone in ("UTC", BERLIN, "Asia/Kolkata", "America/New_York")]
    assert hours == [7.75, 6.75, 2.25, 12.75]


def test_lengths_of_time() -> None:
    assert [duration(text) for text in ("90s", "30m", "2h", "7d", "2w", " 2 H ")] == [90, 1800, 7200, 604800, 1209600, 7200]
    for text in ("", "2", "h", "0h", "-2h", "1.5h", "2y", "1e3s"):
        with pytest.raises(UserError):
            duration(text)
    assert comparison("<30d") == ("<", 30 * 86400)
    assert comparison("> 2h") == (">", 7200)
    for text in ("30d", "= 2h", "< soon", ""):
        with pytest.raises(UserError):
            comparison(text)
