"""/v1/storage and /v1/usage: where KV lies and why, what it costs and what it saves. For admins, of their own tenant."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from serving.api.access import Admin, Parts
from serving.api.errors import BadParameter
from serving.api.json_body import StrictJSON
from serving.api.shapes import administration
from serving.api.shapes.common import told
from serving.doors import storage, usage
from storage.policy.types import DAY

router = APIRouter(prefix="/v1", tags=["economics"], route_class=StrictJSON)
LATEST = 4_102_444_800  # the year 2100
Seconds = Annotated[int | None, Query(ge=0, le=LATEST)]


@router.get("/storage", responses=told(administration.Storage))
def show_storage(parts: Parts, who: Admin) -> dict[str, Any]:
    return storage.show(parts, who)


@router.get("/usage", responses=told(administration.UsagePage))
def show_usage(
    parts: Parts,
    who: Admin,
    start_time: Seconds = None,
    end_time: Seconds = None,
    limit: Annotated[int, Query(ge=1, le=180)] = 31,
    page: Annotated[int | None, Query(ge=0, le=LATEST)] = None,
) -> dict[str, Any]:
    """By default the last `limit` days. `page` is the `next_page` of the page before."""
    end = parts.clock() if end_time is None else end_time
    start = end - (limit - 1) * DAY if start_time is None else start_time
    start = start if page is None else page
    if start > end:
        raise BadParameter("start_time", "start_time is after end_time: name a span of days")
    return usage.show(parts, who, usage.Days(start, end, limit))
