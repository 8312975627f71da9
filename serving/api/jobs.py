"""/v1/jobs, with a stream of a job's events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import StreamingResponse

from serving.api.access import AnyPage, Parts, Reader, Writer
from serving.api.bodies import Body
from serving.api.job_watch import STOPPED, Asked, JobWatch
from serving.api.json_body import StrictJSON
from serving.api.shapes import work
from serving.api.shapes.common import told
from serving.doors import jobs

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictJSON)
HEARTBEAT_SECONDS = 15.0  # a comment after so long without news


class RetryBody(Body):
    only: Literal["failed", "all"] = "failed"


@router.get("", responses=told(work.JobList))
def list_jobs(
    parts: Parts, who: Reader, page: AnyPage, corpus_id: str | None = None, status: work.JobStatus | None = None
) -> dict[str, Any]:
    return jobs.show_all(parts, who, page, corpus_id, status)


@router.get("/{job_id}", responses=told(work.Job))
def retrieve_job(parts: Parts, who: Reader, job_id: str) -> dict[str, Any]:
    return jobs.show(parts, who, job_id)


@router.post("/{job_id}/cancel", responses=told(work.Job))
def cancel_job(parts: Parts, who: Writer, job_id: str) -> dict[str, Any]:
    return jobs.cancel(parts, who, job_id)


@router.post("/{job_id}/retry", responses=told(work.Job))
def retry_job(parts: Parts, who: Writer, job_id: str, body: RetryBody | None = None) -> dict[str, Any]:
    return jobs.retry(parts, who, job_id, (body or RetryBody()).only)


@router.get("/{job_id}/events")
def stream_job_events(
    parts: Parts, who: Reader, job_id: str, request: Request, last_event_id: Annotated[str | None, Header()] = None
) -> StreamingResponse:
    jobs.show(parts, who, job_id)
    after = (
        int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdecimal() else 0
    )
    headers = {"cache-control": "no-cache"}
    events = _events(request.app.state.job_watch, (job_id, who.names), after)
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(watch: JobWatch, asked: Asked, after: int) -> AsyncIterator[str]:
    """The job whenever it has got further, to its end or the server's. Ids grow, so that a client resumes after its last."""
    with watch.watching(asked) as job:
        yield ": waiting\n\n"
        while True:
            news = await job.after(after, HEARTBEAT_SECONDS)
            if news is None:
                yield ": waiting\n\n"
                continue
            if news.number > after or news is STOPPED:
                after = news.number
                yield news.frame
            if news.ended:
                return
