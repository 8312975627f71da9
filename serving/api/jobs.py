"""/v1/jobs, with a stream of a job's events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import anyio
from anyio import to_thread
from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from serving.api.access import AnyPage, Parts, Reader, Writer
from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors import jobs

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
LOOK_SECONDS = 0.3
HEARTBEAT_LOOKS = 50  # a comment after so many looks without news


class RetryBody(BaseModel):
    only: Literal["failed", "all"] = "failed"


@router.get("")
def list_jobs(
    parts: Parts, who: Reader, page: AnyPage, corpus_id: str | None = None, status: str | None = None
) -> dict[str, Any]:
    return jobs.show_all(parts, who, page, corpus_id, status)


@router.get("/{job_id}")
def retrieve_job(parts: Parts, who: Reader, job_id: str) -> dict[str, Any]:
    return jobs.show(parts, who, job_id)


@router.post("/{job_id}/cancel")
def cancel_job(parts: Parts, who: Writer, job_id: str) -> dict[str, Any]:
    return jobs.cancel(parts, who, job_id)


@router.post("/{job_id}/retry")
def retry_job(parts: Parts, who: Writer, job_id: str, body: RetryBody | None = None) -> dict[str, Any]:
    return jobs.retry(parts, who, job_id, (body or RetryBody()).only)


@router.get("/{job_id}/events")
def stream_job_events(
    parts: Parts, who: Reader, job_id: str, last_event_id: Annotated[str | None, Header()] = None
) -> StreamingResponse:
    jobs.show(parts, who, job_id)
    after = (
        int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdecimal() else 0
    )
    headers = {"cache-control": "no-cache"}
    return StreamingResponse(_events(parts, who, job_id, after), media_type="text/event-stream", headers=headers)


async def _events(parts: ApiParts, who: Principal, job_id: str, after: int) -> AsyncIterator[str]:
    """The job whenever it has got further, to its end. Ids grow, so that a client resumes after its last."""
    quiet = 0
    while True:
        news = await to_thread.run_sync(jobs.event, parts, who, job_id, after)
        if news is not None:
            after, quiet = news[0], 0
            yield f"id: {after}\nevent: job\ndata: {json.dumps(news[1], ensure_ascii=False)}\n\n"
        elif quiet % HEARTBEAT_LOOKS == 0:
            yield ": waiting\n\n"
        if (news is not None and news[1]["status"] in jobs.ENDED) or await _ended(
            parts, who, job_id, news is None
        ):
            return
        quiet += 1
        await anyio.sleep(LOOK_SECONDS)


async def _ended(parts: ApiParts, who: Principal, job_id: str, ask: bool) -> bool:
    """A client that resumes after the last event of an ended job gets no more of it."""
    if not ask:
        return False
    latest = await to_thread.run_sync(jobs.event, parts, who, job_id, -1)
    return latest is None or latest[1]["status"] in jobs.ENDED
