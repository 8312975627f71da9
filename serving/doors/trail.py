"""The audit trail as a list."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors.paging import Page, listing
from storage.catalogue.schema import AuditEvent
from storage.errors import NotFound


def audit_trail(parts: ApiParts, who: Principal, page: Page) -> dict[str, Any]:
    """A page of what was done with the tenant's keys. Event ids grow with time."""
    query = select(AuditEvent).where(AuditEvent.tenant_id == who.tenant_id)
    if page.after is not None:
        number = _number(page.after)
        query = query.where(AuditEvent.id < number if page.order == "desc" else AuditEvent.id > number)
    query = query.order_by(AuditEvent.id.desc() if page.order == "desc" else AuditEvent.id)
    with parts.catalogue.read() as session:
        rows = session.scalars(query.limit(page.limit + 1)).all()
    return listing([_shape(row) for row in rows[: page.limit]], len(rows) > page.limit)


def _number(event_id: str) -> int:
    number = event_id.removeprefix("audit-")
    if not (number.isascii() and number.isdecimal()) or len(number) > 18:
        raise NotFound(f"No such audit event: {event_id!r}")
    return int(number)


def _shape(row: AuditEvent) -> dict[str, Any]:
    return {
        "id": f"audit-{row.id}",
        "object": "audit_event",
        "key_id": row.key_id,
        "action": row.action,
        "target": row.target,
        "at": row.at,
    }
