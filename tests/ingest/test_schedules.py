"""Schedules fire at the local time they name, once, and never for a time when nobody was there."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fixtures_work import Work, open_work
from sqlalchemy import select, update

from ingest import schedules
from ingest.schedules import create_schedule, next_due
from storage.catalogue.schema import Corpus, Job, Schedule, ScheduleRun
from storage.errors import UserError


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("cron", "zone", "after", "due"),
    [
        ("30 2 * * *", "UTC", "2026-03-28T02:30", "2026-03-29T02:30"),
        # Berlin goes from +1 to +2 on 29 March 2026 at 01:00 UTC: 02:30 does not exist that night.
        ("0 3 * * *", "Europe/Berlin", "2026-03-28T12:00", "2026-03-29T01:00"),
        ("0 9 * * *", "Europe/Berlin", "2026-03-28T12:00", "2026-03-29T07:00"),
        ("0 9 * * *", "Europe/Berlin", "2026-03-27T12:00", "2026-03-28T08:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", "2026-03-29T01:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-03-29T01:00", "2026-03-30T00:30"),
        # And back on 25 October at 01:00 UTC: 02:30 comes twice, the schedule once.
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", "2026-10-25T00:30"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:30", "2026-10-26T01:30"),
        ("0 0 1 * *", "Asia/Kolkata", "2026-01-15T00:00", "2026-01-31T18:30"),
    ],
)
def test_the_next_time_is_by_the_zones_own_clocks(cron: str, zone: str, after: str, due: str) -> None:
    assert datetime.fromtimestamp(next_due(cron, zone, at(after)), UTC) == datetime.fromtimestamp(
        at(due), UTC
    )


@pytest.mark.parametrize(
    ("cron", "zone"),
    [
        ("every day", "UTC"),
        ("61 * * * *", "UTC"),
        ("* * * *", "UTC"),
        ("* * * * * *", "UTC"),
        ("0 0 30 2 *", "UTC"),
        ("0 0 * * *", "Mars/Olympus"),
        ("0 0 * * *", "../../etc/passwd"),
        ("0 0 * * *", ""),
    ],
)
def test_a_wrong_line_or_zone_is_refused(cron: str, zone: str) -> None:
    with pytest.raises(UserError):
        next_due(cron, zone, time.time())


@pytest.mark.parametrize(
    ("cron", "zone", "said"),
    [("61 * * * *", "Mars/Olympus", "time zone 'Mars/Olympus'"), ("every day", "", "time zone ''"),
     ("every day", "UTC", "five fields"), ("", "UTC", "five fields"), ("61 * * * *", "UTC", "cannot be read")],
)  # fmt: skip
def test_the_zone_is_spoken_of_first_then_the_line_then_the_source(work: Work, cron: str, zone: str, said: str) -> None:
    corpus = work.corpus()  # without a source: what has been mistyped is said all the same
    with work.catalogue.write() as session, pytest.raises(UserError, match=said):
        create_schedule(session, session.get_one(Corpus, corpus.id), cron, zone)


@pytest.fixture
def schedule(work: Work, tmp_path: Path) -> Schedule:
    """Due every minute, and due since one second."""
    corpus = work.corpus(source={"type": "folder", "path": str(tmp_path)})
    with work.catalogue.write() as session:
        made = create_schedule(session, session.get_one(Corpus, corpus.id), "* * * * *")
        made.next_due_at = time.time() - 1
    return made


def outcomes(work: Work) -> list[str]:
    with work.catalogue.read() as session:
        return list(session.scalars(select(ScheduleRun.outcome).order_by(ScheduleRun.due_at)))


def test_what_is_due_fires_once_and_is_due_again_later(work: Work, schedule: Schedule) -> None:
    now = time.time()
    assert schedules.tick(work.catalogue, now, work.rung.append) == 1
    assert schedules.tick(work.catalogue, now, work.rung.append) == 0
    assert work.rung == ["ingest"]
    with work.catalogue.read() as session:
        job = session.scalars(select(Job)).one()
        run = session.scalars(select(ScheduleRun)).one()
        again = session.get_one(Schedule, schedule.id)
    assert (job.type, job.stage, job.corpus_id) == ("sync", "fetch", schedule.corpus_id)
    assert (run.job_id, run.outcome, run.due_at) == (job.id, "started", schedule.next_due_at)
    assert now < again.next_due_at <= now + 60


def test_two_schedulers_fire_once(work: Work, schedule: Schedule, tmp_path: Path) -> None:
    others = [open_work(tmp_path) for _ in range(4)]
    barrier = threading.Barrier(4)
    now = time.time()

    def ticks(other: Work) -> None:
        barrier.wait()
        for _ in range(5):
            schedules.tick(other.catalogue, now, lambda queue: None)

    threads = [threading.Thread(target=ticks, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        others.pop().catalogue.close()
    assert outcomes(work) == ["started"]
    assert work.count(Job) == 1


def test_a_running_sync_makes_the_next_one_skip(work: Work, schedule: Schedule) -> None:
    now = time.time()
    schedules.tick(work.catalogue, now, work.rung.append)
    assert schedules.tick(work.catalogue, now + 60, work.rung.append) == 0
    assert outcomes(work) == ["started", "skipped_overlap"]
    with work.catalogue.write() as session:
        session.execute(update(Job).values(status="completed"))
    assert schedules.tick(work.catalogue, now + 120, work.rung.append) == 1


def test_nothing_is_caught_up_after_a_downtime(work: Work, schedule: Schedule) -> None:
    later = time.time() + 3 * 3600
    assert schedules.tick(work.catalogue, later, work.rung.append) == 0
    assert outcomes(work) == []
    with work.catalogue.read() as session:
        assert later < session.get_one(Schedule, schedule.id).next_due_at <= later + 60
    assert schedules.tick(work.catalogue, later + 60, work.rung.append) == 1


def test_a_disabled_schedule_does_not_fire_and_a_changed_one_is_due_by_its_new_line(
    work: Work, schedule: Schedule
) -> None:
    with work.catalogue.write() as session:
        schedules.change_schedule(session.get_one(Schedule, schedule.id), enabled=False)
        session.execute(update(Schedule).values(next_due_at=time.time() - 1))
    assert schedules.tick(work.catalogue, time.time(), work.rung.append) == 0
    with work.catalogue.write() as session:
        row = session.get_one(Schedule, schedule.id)
        schedules.change_schedule(row, enabled=True, cron="0 0 1 1 *")
        assert row.next_due_at > time.time()
        with pytest.raises(UserError):
            schedules.change_schedule(row, cron="nonsense")
        assert row.cron == "0 0 1 1 *"


def test_a_corpus_whose_source_was_taken_away_is_reported(work: Work, schedule: Schedule) -> None:
    with work.catalogue.write() as session:
        session.get_one(Corpus, schedule.corpus_id).source = None
    assert schedules.tick(work.catalogue, time.time(), work.rung.append) == 0
    assert outcomes(work) == ["failed"]


def test_a_corpus_without_a_source_gets_no_schedule(work: Work) -> None:
    corpus: Any = work.corpus("plain")
    with work.catalogue.write() as session, pytest.raises(UserError, match="source"):
        create_schedule(session, corpus, "* * * * *")
