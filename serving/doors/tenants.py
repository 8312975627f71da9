"""Tenants and sharing groups, for operators. An operator sees that a tenant is there and what it may, and nothing of what
it holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from serving.api.parts import ApiParts
from serving.auth import NewKey, Principal, add_key, audit, key_shape
from storage.catalogue.schema import Corpus, Document, SharingGroup, Tenant
from storage.errors import NotFound, UserError

SHARED = "shared:"  # no tenant's id begins so
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}")


def create(parts: ApiParts, who: Principal, tenant_id: str, limits: dict[str, int | None]) -> dict[str, Any]:
    """Make a tenant and its first admin key, which only this answer holds. Raises UserError."""
    _check_name(tenant_id, "tenant")
    with parts.catalogue.write() as session:
        if session.get(Tenant, tenant_id) is not None:
            raise UserError(f"There is a tenant {tenant_id!r} already.", code="tenant_exists")
        now = parts.clock()
        tenant = Tenant(id=tenant_id, name=tenant_id, created_at=now, **limits)
        session.add(tenant)
        session.flush()
        row, key = add_key(session, parts.secret, tenant_id, NewKey("first admin key", ("admin",)), now)
        audit(session, who, "tenant.create", tenant_id, now)
        return {**_shape(tenant), "api_key": {**key_shape(row), "key": key}}


def show_all(parts: ApiParts) -> list[dict[str, Any]]:
    """All tenants, oldest first."""
    with parts.catalogue.read() as session:
        return [_shape(row) for row in session.scalars(select(Tenant).order_by(Tenant.created_at, Tenant.id))]


def show(parts: ApiParts, tenant_id: str) -> dict[str, Any]:
    """One tenant. Raises NotFound."""
    with parts.catalogue.read() as session:
        return _shape(_find(session, tenant_id))


def change(
    parts: ApiParts, who: Principal, tenant_id: str, limits: dict[str, int | None], disabled: bool | None
) -> dict[str, Any]:
    """Set what is given. A disabled tenant's keys and logins open nothing; what it holds stays. Raises NotFound, UserError."""
    with parts.catalogue.write() as session:
        tenant = _find(session, tenant_id)
        if disabled and tenant_id == who.tenant_id:
            raise UserError("An operator's own tenant cannot be disabled: the key that could undo it would be lost.")
        for name, value in limits.items():
            setattr(tenant, name, value)
        if disabled is not None and disabled != (tenant.disabled_at is not None):
            tenant.disabled_at = parts.clock() if disabled else None
            audit(session, who, "tenant.disable" if disabled else "tenant.enable", tenant_id, parts.clock())
        if limits:
            audit(session, who, "tenant.limits", tenant_id, parts.clock())
        return _shape(tenant)


def _find(session: Session, tenant_id: str) -> Tenant:
    tenant = session.get(Tenant, tenant_id)
    if tenant is None:
        raise NotFound(f"No such tenant: {tenant_id!r}")
    return tenant


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(f"the name of a {what} is up to 48 lower-case letters, digits, '-' and '_', not {name!r}")


def _shape(row: Tenant) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "tenant",
        "created_at": int(row.created_at),
        "disabled_at": None if row.disabled_at is None else int(row.disabled_at),
        "quota_bytes": row.quota_bytes,
        "tokens_per_day": row.tokens_per_day,
    }


# --- sharing groups ---


def set_group(parts: ApiParts, who: Principal, name: str, tenants: Sequence[str]) -> dict[str, Any]:
    """Let these tenants, and no others, declare corpora shared under a name. Corpora declared so far stay; a tenant that
    is to leave deletes them first. Raises NotFound, UserError."""
    _check_name(name, "sharing group")
    with parts.catalogue.write() as session:
        for tenant_id in tenants:
            _find(session, tenant_id)
        users = select(Corpus.tenant_id).where(Corpus.sharing_group == SHARED + name).distinct()
        if left := sorted(set(session.scalars(users)) - set(tenants)):
            raise UserError(f"tenant {left[0]!r} has corpora in this sharing group: they are to be deleted first")
        row = session.get(SharingGroup, name)
        if row is None:
            row = SharingGroup(name=name, tenants=[], created_at=parts.clock())
            session.add(row)
        row.tenants = sorted(set(tenants))
        audit(session, who, "sharing_group.set", name, parts.clock())
        return _group_shape(row)


def groups(parts: ApiParts) -> list[dict[str, Any]]:
    """All sharing groups by name."""
    with parts.catalogue.read() as session:
        return [_group_shape(row) for row in session.scalars(select(SharingGroup).order_by(SharingGroup.name))]


def share(session: Session, who: Principal, corpus: Corpus, group: str | None) -> None:
    """Declare a corpus shared, or its tenant's own again (None), in the caller's transaction. Only while it is empty:
    KV is named under its group. Raises NotFound, UserError."""
    wanted = who.tenant_id if group is None else SHARED + group
    if wanted == corpus.sharing_group:
        return
    row = session.get(SharingGroup, group) if group is not None else None
    if group is not None and (row is None or who.tenant_id not in row.tenants):
        raise NotFound(f"No such sharing group: {group!r}")
    if session.scalars(select(Document.id).where(Document.corpus_id == corpus.id).limit(1)).first() is not None:
        raise UserError("Only an empty vector store can be shared or cease to be: its documents' KV belongs to its group.")
    corpus.sharing_group = wanted


def _group_shape(row: SharingGroup) -> dict[str, Any]:
    return {"name": row.name, "object": "sharing_group", "tenants": row.tenants, "created_at": int(row.created_at)}
