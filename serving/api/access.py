"""What a route asks for in its signature: the parts, a principal with a scope, a page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request

from serving.api.parts import ApiParts
from serving.auth import Forbidden, Principal
from serving.doors.paging import Page


# Asynchronous, so that no dependency waits for a thread: the pool may be full of uploads.
async def _parts(request: Request) -> ApiParts:
    parts: ApiParts = request.app.state.parts
    return parts


def _needs(scope: str) -> Callable[[Request], Awaitable[Principal]]:
    async def dependency(request: Request) -> Principal:
        principal: Principal = request.state.principal
        request.state.needed = scope
        if not principal.may(scope):
            raise Forbidden(f"This key has no {scope!r} scope.")
        return principal

    return dependency


Parts = Annotated[ApiParts, Depends(_parts)]
Reader = Annotated[Principal, Depends(_needs("read"))]
Writer = Annotated[Principal, Depends(_needs("write"))]
Admin = Annotated[Principal, Depends(_needs("admin"))]
Operator = Annotated[Principal, Depends(_needs("operator"))]


def _page(
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Page:
    return Page(limit, after, order)


def _long_page(
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Page:
    return Page(limit, after, order)


AnyPage = Annotated[Page, Depends(_page)]
LongPage = Annotated[Page, Depends(_long_page)]


def deleted(id: str, object: str) -> dict[str, Any]:
    """OpenAI's answer to a delete."""
    return {"id": id, "object": object, "deleted": True}
