"""/v1/schedules: when a corpus is synced from its source."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from serving.api.access import AnyPage, Parts, Reader, Writer, deleted
from serving.api.bodies import Body
from serving.api.json_body import StrictJSON
from serving.api.shapes import work
from serving.api.shapes.common import Deleted, told
from serving.doors import schedules

router = APIRouter(prefix="/v1/schedules", tags=["schedules"], route_class=StrictJSON)
Cron = Annotated[str, Field(max_length=200)]  # what is wrong with one, storage/cron.py says better
Zone = Annotated[str, Field(max_length=100)]


class ScheduleBody(Body):
    corpus_id: str
    cron: Cron
    timezone: Zone = "UTC"


class ScheduleChange(Body):
    cron: Cron | None = None
    timezone: Zone | None = None
    enabled: bool | None = None


@router.post("", responses=told(work.Schedule))
def create_schedule(parts: Parts, who: Writer, body: ScheduleBody) -> dict[str, Any]:
    return schedules.create(parts, who, body.corpus_id, body.cron, body.timezone)


@router.get("", responses=told(work.ScheduleList))
def list_schedules(parts: Parts, who: Reader, page: AnyPage) -> dict[str, Any]:
    return schedules.show_all(parts, who, page)


@router.get("/{schedule_id}", responses=told(work.ScheduleWithRuns))
def retrieve_schedule(parts: Parts, who: Reader, schedule_id: str) -> dict[str, Any]:
    return schedules.show(parts, who, schedule_id)


@router.post("/{schedule_id}", responses=told(work.Schedule))
def update_schedule(parts: Parts, who: Writer, schedule_id: str, body: ScheduleChange) -> dict[str, Any]:
    return schedules.change(parts, who, schedule_id, body.cron, body.timezone, body.enabled)


@router.delete("/{schedule_id}", responses=told(Deleted))
def delete_schedule(parts: Parts, who: Writer, schedule_id: str) -> dict[str, Any]:
    schedules.remove(parts, who, schedule_id)
    return deleted(schedule_id, "schedule")
