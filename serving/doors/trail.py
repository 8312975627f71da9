"""The audit log as a list, and as lines to keep elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, select

from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors.paging import Page, listing
from storage.catalogue.schema import AuditEvent
from storage.errors import NotFound

BATCH = 1000  # rows of an export that are held at once


@dataclass(frozen=True)
class Filter:
    """Which events are wanted; None: all. Seconds since the epoch, `until` being the first that is not."""

    since: float | None = None
    until: float | None = None
    action: str | None = None
    key_id: str | None = None
    target: str | None = None
    outcome: str | None = None

    def clauses(self) -> list[ColumnElement[bool]]:
        """The filter in SQL."""
        same = {"action": self.action, "key_id": self.key_id, "target": self.target, "outcome": self.outcome}
        found = [getattr(AuditEvent, name) == value for name, value in same.items() if value is not None]
        if self.since is not None:
            found.append(AuditEvent.at >= self.since)
        if self.until is not None:
            found.append(AuditEvent.at < self.until)
        return found


def audit_trail(parts: ApiParts, who: Principal, page: Page, wanted: Filter) -> dict[str, Any]:
    """A page of what was done with the tenant's keys. Event ids grow with time."""
    query = select(AuditEvent).where(AuditEvent.tenant_id == who.tenant_id, *wanted.clauses())
    if page.after is not None:
        number = _number(page.after)
        query = query.where(AuditEvent.id < number if page.order == "desc" else AuditEvent.id > number)
    query = query.order_by(AuditEvent.id.desc() if page.order == "desc" else AuditEvent.id)
    with parts.catalogue.read() as session:
        rows = session.scalars(query.limit(page.limit + 1)).all()
    return listing([shape(row) for row in rows[: page.limit]], len(rows) > page.limit)


def export(parts: ApiParts, who: Principal, wanted: Filter) -> Iterator[str]:
    """The tenant's events as lines of JSON, oldest first; no transaction is held while a slow reader reads."""
    last = 0
    while True:
        own = (AuditEvent.tenant_id == who.tenant_id, AuditEvent.id > last)
        query = select(AuditEvent).where(*own, *wanted.clauses()).order_by(AuditEvent.id).limit(BATCH)
        with parts.catalogue.read() as session:
            rows = session.scalars(query).all()
        yield "".join(json.dumps(shape(row)) + "\n" for row in rows)
        if len(rows) < BATCH:
            return
        last = rows[-1].id


def _number(event_id: str) -> int:
    number = event_id.removeprefix("audit-")
    if not (number.isascii() and number.isdecimal()) or len(number) > 18:
        raise NotFound(f"No such audit event: {event_id!r}")
    return int(number)


def shape(row: AuditEvent) -> dict[str, Any]:
    """An event as the API shows it. `seq` and `mac` are null for events from before there was a chain."""
    return {
        "id": f"audit-{row.id}",
        "object": "audit_event",
        "tenant_id": row.tenant_id,
        "key_id": row.key_id,
        "user_id": row.user_id,
        "action": row.action,
        "target": row.target,
        "at": row.at,
        "request_id": row.request_id,
        "outcome": row.outcome,
        "seq": row.seq,
        "mac": row.mac,
    }
