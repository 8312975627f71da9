"""Outside /v1, without a key: is the process alive, is all it needs there, and what has it counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from serving.api.access import Parts
from serving.api.errors import log_failure
from serving.api.json_body import StrictJSON
from serving.api.parts import ApiParts
from serving.api.shapes import inference
from serving.api.shapes.common import told

router = APIRouter(tags=["health"], route_class=StrictJSON)
CHECK_SECONDS = 3.0


@router.get("/healthz", responses=told(inference.Alive))
async def healthz() -> dict[str, str]:
    """The process answers. Needs no thread, no database and no engine."""
    return {"status": "ok"}


@router.get("/readyz", responses={**told(inference.Readiness), 503: {"model": inference.Readiness}})
async def readyz(parts: Parts, request: Request) -> JSONResponse:
    if request.app.state.drain.begun:
        return JSONResponse({"status": "stopping"}, 503)
    checks = await run_checks(parts)
    ready = all(state == "ok" for state in checks.values())
    body = {
        "status": "ok" if ready else "unavailable",
        "checks": checks,
        "policy": "the file has mistakes: the version before it is in force" if parts.placement.policy.error else "ok",
        "model": {"id": parts.engine.model_id, "full_prefill_reason": parts.engine.full_prefill_reason},
    }
    return JSONResponse(body, 200 if ready else 503)


@router.get("/metrics")
def metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def run_checks(parts: ApiParts) -> dict[str, str]:
    """What a question needs, each `ok` or what is wrong with it. Side by side, each within a few seconds."""
    probes: dict[str, Callable[[], Any]] = {
        "database": parts.catalogue.ping,
        "broker": parts.check_broker,
        "object_store": lambda: parts.objects.size("health/probe"),
        "engine": parts.check_engine,
    }
    states = dict.fromkeys(probes, "no answer in time")
    limiter = CapacityLimiter(len(probes))  # its own threads: the pool may be full of uploads

    async def check(name: str, probe: Callable[[], Any]) -> None:
        try:
            await to_thread.run_sync(probe, abandon_on_cancel=True, limiter=limiter)
            states[name] = "ok"
        except Exception as error:  # noqa: BLE001 - whatever it is, this part is not there
            log_failure(error)
            states[name] = f"failed: {type(error).__name__}"

    with anyio.move_on_after(CHECK_SECONDS):
        async with anyio.create_task_group() as group:
            for name, probe in probes.items():
                group.start_soon(check, name, probe)
    return states
