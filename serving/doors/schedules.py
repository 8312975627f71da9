"""Schedules, within the asker's rights."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.schedules import change_schedule, create_schedule
from serving.api.parts import ApiParts
from serving.auth import Principal, audit
from serving.doors import corpora
from serving.doors.paging import Page, listing, window
from storage.catalogue.schema import Schedule, ScheduleRun
from storage.errors import NotFound

RUNS_SHOWN = 10


def find(session: Session, who: Principal, schedule_id: str) -> Schedule:
    """A schedule by id. Raises NotFound."""
    row = session.get(Schedule, schedule_id)
    if row is None or row.tenant_id != who.tenant_id or not who.sees(row.corpus_id):
        raise NotFound(f"No such schedule: {schedule_id!r}")
    return row


def create(parts: ApiParts, who: Principal, corpus_id: str, cron: str, timezone: str) -> dict[str, Any]:
    """A schedule that syncs a corpus from its source. Raises NotFound, UserError."""
    with parts.catalogue.write() as session:
        return shape(create_schedule(session, corpora.find(session, who, corpus_id), cron, timezone))


def show_all(parts: ApiParts, who: Principal, page: Page) -> dict[str, Any]:
    """A page of schedules."""
    query = select(Schedule).where(Schedule.tenant_id == who.tenant_id)
    query = query if who.corpora is None else query.where(Schedule.corpus_id.in_(who.corpora))
    with parts.catalogue.read() as session:
        cursor = find(session, who, page.after) if page.after else None
        rows, more = window(session, query, Schedule, page, cursor)
        return listing([shape(row) for row in rows], more)


def show(parts: ApiParts, who: Principal, schedule_id: str) -> dict[str, Any]:
    """One schedule with its last runs. Raises NotFound."""
    with parts.catalogue.read() as session:
        row = find(session, who, schedule_id)
        runs = (
            select(ScheduleRun).where(ScheduleRun.schedule_id == row.id).order_by(ScheduleRun.due_at.desc())
        )
        last = session.scalars(runs.limit(RUNS_SHOWN)).all()
        return {**shape(row), "runs": [_run_shape(run) for run in last]}


def change(
    parts: ApiParts, who: Principal, schedule_id: str, cron: str | None, timezone: str | None, on: bool | None
) -> dict[str, Any]:
    """Change a schedule; None leaves a field as it is. Raises NotFound, UserError."""
    with parts.catalogue.write() as session:
        row = find(session, who, schedule_id)
        change_schedule(row, cron=cron, timezone=timezone, enabled=on)
        return shape(row)


def remove(parts: ApiParts, who: Principal, schedule_id: str) -> None:
    """Delete a schedule and the record of its runs; its jobs stay. Raises NotFound."""
    with parts.catalogue.write() as session:
        row = find(session, who, schedule_id)
        session.execute(delete(ScheduleRun).where(ScheduleRun.schedule_id == row.id))
        session.delete(row)
        audit(session, who, "schedule.delete", schedule_id, parts.clock())


def shape(row: Schedule) -> dict[str, Any]:
    """A schedule as the API shows it."""
    return {
        "id": row.id,
        "object": "schedule",
        "corpus_id": row.corpus_id,
        "cron": row.cron,
        "timezone": row.timezone,
        "enabled": row.enabled,
        "next_due_at": row.next_due_at,
        "created_at": row.created_at,
    }


def _run_shape(run: ScheduleRun) -> dict[str, Any]:
    return {"due_at": run.due_at, "fired_at": run.fired_at, "job_id": run.job_id, "outcome": run.outcome}
