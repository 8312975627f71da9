"""/v1/api_keys and /v1/audit, for admins. A key restricted to corpora administers no keys of others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse
from pydantic import Field

from serving.api.access import Admin, AnyPage, Parts
from serving.api.bodies import Body
from serving.api.json_body import StrictJSON
from serving.api.shapes import administration
from serving.api.shapes.common import told
from serving.auth import Forbidden, NewKey, Principal, create_key, list_keys, revoke_key
from serving.doors import trail
from serving.doors.paging import listing
from serving.doors.trail import Filter

router = APIRouter(prefix="/v1", tags=["administration"], route_class=StrictJSON)
PrincipalName = Annotated[str, Field(min_length=1, max_length=255)]
PerMinute = Annotated[int, Field(ge=1, le=10**9)]


class KeyBody(Body):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    scopes: Annotated[list[Literal["read", "write", "admin", "operator"]], Field(min_length=1)] = Field(["read", "write"])
    corpora: list[str] | None = None
    expires_at: Annotated[float, Field(ge=0, le=1e11)] | None = None  # seconds since the epoch
    # Names beside the key's id by which documents' access lists know it, e.g. group:legal.
    principals: Annotated[list[PrincipalName], Field(max_length=100)] = Field([])
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None

    def wanted(self) -> NewKey:
        corpora = None if self.corpora is None else tuple(dict.fromkeys(self.corpora))
        return NewKey(
            self.name, tuple(dict.fromkeys(self.scopes)), corpora, self.expires_at, tuple(dict.fromkeys(self.principals)),
            self.requests_per_minute, self.tokens_per_minute,
        )  # fmt: skip


@router.post("/api_keys", responses=told(administration.NewApiKey))
def create_api_key(parts: Parts, who: Admin, body: KeyBody) -> dict[str, Any]:
    return create_key(parts.catalogue, parts.secret, who, body.wanted(), parts.clock)


@router.get("/api_keys", responses=told(administration.ApiKeyList))
def list_api_keys(parts: Parts, who: Admin) -> dict[str, Any]:
    return listing(list_keys(parts.catalogue, who), has_more=False)


@router.delete("/api_keys/{key_id}", responses=told(administration.RevokedApiKey))
def revoke_api_key(parts: Parts, who: Admin, key_id: str) -> dict[str, Any]:
    return {**revoke_key(parts.catalogue, who, key_id, parts.clock), "deleted": True}


def _whole_tenant(who: Admin) -> Principal:
    if who.corpora is not None:
        raise Forbidden("The audit log covers all corpora: use a key that is not restricted.")
    return who


Auditor = Annotated[Principal, Depends(_whole_tenant)]


def _wanted(
    since: float | None = None,
    until: float | None = None,
    action: str | None = None,
    key_id: str | None = None,
    target: str | None = None,
    outcome: Literal["ok", "denied"] | None = None,
) -> Filter:
    """Times are seconds since the epoch; `until` is the first that is not wanted."""
    return Filter(since, until, action, key_id, target, outcome)


Wanted = Annotated[Filter, Depends(_wanted)]


@router.get("/audit", responses=told(administration.AuditEventList))
def list_audit_events(parts: Parts, who: Auditor, page: AnyPage, wanted: Wanted) -> dict[str, Any]:
    return trail.audit_trail(parts, who, page, wanted)


@router.get("/audit/export", response_class=StreamingResponse)
def export_audit_events(parts: Parts, who: Auditor, wanted: Wanted) -> StreamingResponse:
    """Every event as JSON Lines, oldest first, with its number and MAC."""
    return StreamingResponse(trail.export(parts, who, wanted), media_type="application/jsonl")
