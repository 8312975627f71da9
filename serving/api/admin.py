"""/v1/api_keys and /v1/audit, for admins. A key restricted to corpora administers no keys of others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from serving.api.access import Admin, AnyPage, Parts
from serving.auth import Forbidden, NewKey, create_key, list_keys, revoke_key
from serving.doors import trail
from serving.doors.paging import listing

router = APIRouter(prefix="/v1", tags=["administration"])


class KeyBody(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    scopes: Annotated[list[Literal["read", "write", "admin"]], Field(min_length=1)] = ["read", "write"]
    corpora: list[str] | None = None

    def wanted(self) -> NewKey:
        corpora = None if self.corpora is None else tuple(dict.fromkeys(self.corpora))
        return NewKey(self.name, tuple(dict.fromkeys(self.scopes)), corpora)


@router.post("/api_keys")
def create_api_key(parts: Parts, who: Admin, body: KeyBody) -> dict[str, Any]:
    return create_key(parts.catalogue, parts.secret, who, body.wanted(), parts.clock)


@router.get("/api_keys")
def list_api_keys(parts: Parts, who: Admin) -> dict[str, Any]:
    return listing(list_keys(parts.catalogue, who), has_more=False)


@router.delete("/api_keys/{key_id}")
def revoke_api_key(parts: Parts, who: Admin, key_id: str) -> dict[str, Any]:
    return {**revoke_key(parts.catalogue, who, key_id, parts.clock), "deleted": True}


@router.get("/audit")
def list_audit_events(parts: Parts, who: Admin, page: AnyPage) -> dict[str, Any]:
    if who.corpora is not None:
        raise Forbidden("The audit trail covers all corpora: use a key that is not restricted.")
    return trail.audit_trail(parts, who, page)
