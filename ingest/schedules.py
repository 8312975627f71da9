"""Schedules: a cron line in a named time zone, next due at a time that a tick claims."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.jobs import new_id
from ingest.sync import queue_sync, running_syncs
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, Schedule, ScheduleRun
from storage.cron import next_due
from storage.errors import UserError

log = structlog.get_logger()
GRACE = 60.0  # a tick that comes later than this was down when the schedule was due: it fires nothing


def create_schedule(session: Session, corpus: Corpus, cron: str, timezone: str = "UTC") -> Schedule:
    """A schedule that syncs the corpus from its source. Raises UserError."""
    due = next_due(cron, timezone, time.time())  # first: whoever has mistyped a line wants to hear of that
    if corpus.source is None:
        raise UserError("only a corpus with a source can be synced on schedule")
    schedule = Schedule(
        id=new_id("sched"),
        tenant_id=corpus.tenant_id,
        corpus_id=corpus.id,
        cron=cron,
        timezone=timezone,
        enabled=True,
        next_due_at=due,
        created_at=time.time(),
    )
    session.add(schedule)
    session.flush()
    return schedule


def change_schedule(
    schedule: Schedule, *, cron: str | None = None, timezone: str | None = None, enabled: bool | None = None
) -> None:
    """Change a schedule; its next time is found anew, from now. Raises UserError."""
    cron = schedule.cron if cron is None else cron
    timezone = schedule.timezone if timezone is None else timezone
    schedule.next_due_at = next_due(cron, timezone, time.time())
    schedule.cron, schedule.timezone = cron, timezone
    schedule.enabled = schedule.enabled if enabled is None else enabled


def tick(catalogue: Catalogue, now: float, ring: Callable[[str], None]) -> int:
    """Fire what is due; how many jobs began. Any number of schedulers may tick: each due time fires once."""
    with catalogue.read() as session:
        due = select(Schedule.id).where(Schedule.enabled, Schedule.next_due_at <= now)
        ids = session.scalars(due.order_by(Schedule.next_due_at)).all()
    started = 0
    for schedule_id in ids:
        with catalogue.write() as session:
            started += _fire(session, schedule_id, now)
    if started:
        ring("ingest")
    return started


def _fire(session: Session, schedule_id: str, now: float) -> bool:
    query = select(Schedule).where(Schedule.id == schedule_id, Schedule.enabled, Schedule.next_due_at <= now)
    schedule = session.scalars(query.with_for_update(skip_locked=True)).first()
    if schedule is None:
        return False  # another scheduler has it
    due_at = schedule.next_due_at
    schedule.next_due_at = next_due(schedule.cron, schedule.timezone, now)
    if now - due_at > GRACE:
        log.info("schedule_missed", schedule=schedule.id, late_s=round(now - due_at))
        return False
    run = ScheduleRun(schedule_id=schedule.id, due_at=due_at, fired_at=now, outcome="started")
    session.add(run)
    if running_syncs(session, schedule.corpus_id):
        run.outcome = "skipped_overlap"
        return False
    corpus = session.get_one(Corpus, schedule.corpus_id)
    try:
        run.job_id = queue_sync(session, corpus, {"schedule_id": schedule.id}).id
    except UserError:
        run.outcome = "failed"
    return run.outcome == "started"
