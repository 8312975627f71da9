"""A corpus's hook, for admins; and /hooks for git hosts, which show no API key but sign each delivery."""

from __future__ import annotations

from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request

from serving.api.access import Admin, Parts, deleted
from serving.api.json_body import StrictJSON
from serving.api.shapes import work
from serving.api.shapes.common import Deleted, told
from serving.doors import hooks

router = APIRouter(tags=["hooks"], route_class=StrictJSON)


@router.post("/v1/corpora/{corpus_id}/hook", responses=told(work.NewHook))
def create_hook(parts: Parts, who: Admin, corpus_id: str) -> dict[str, Any]:
    return hooks.make(parts, who, corpus_id)


@router.get("/v1/corpora/{corpus_id}/hook", responses=told(work.HookWithDeliveries))
def retrieve_hook(parts: Parts, who: Admin, corpus_id: str) -> dict[str, Any]:
    return hooks.show(parts, who, corpus_id)


@router.delete("/v1/corpora/{corpus_id}/hook", responses=told(Deleted))
def delete_hook(parts: Parts, who: Admin, corpus_id: str) -> dict[str, Any]:
    return deleted(hooks.remove(parts, who, corpus_id), "corpus.hook")


@router.post("/hooks/{hook_id}", responses=told(work.Push))
async def deliver_push(parts: Parts, request: Request, hook_id: str) -> dict[str, Any]:
    return await to_thread.run_sync(hooks.deliver, parts, hook_id, dict(request.headers), await request.body())
