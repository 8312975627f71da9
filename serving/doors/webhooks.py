"""Webhooks, within the asker's rights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.jobs import new_id
from ingest.webhooks import EVENTS, webhook_secret
from serving.api.parts import ApiParts
from serving.auth import Forbidden, Principal, audit
from serving.doors import corpora
from storage.catalogue.schema import Webhook, WebhookDelivery
from storage.errors import NotFound, UserError

MOST = 20  # webhooks of a tenant
SHOWN = 20  # of a webhook's deliveries


def find(session: Session, who: Principal, webhook_id: str) -> Webhook:
    """A webhook by id. Raises NotFound."""
    row = session.get(Webhook, webhook_id)
    if row is None or row.tenant_id != who.tenant_id or not _within(who, row):
        raise NotFound(f"No such webhook: {webhook_id!r}")
    return row


def add(parts: ApiParts, who: Principal, url: str, events: Sequence[str] | None, wanted: Sequence[str] | None) -> dict[str, Any]:
    """Have an address told of the ends of jobs, of these corpora (by id or name) or all, with these
    events or all. Only this answer holds its secret.

    Raises Forbidden, NotFound, HostRefused, UserError."""
    parts.reach.hosts.check(url)
    if wanted is None and who.corpora is not None:
        raise Forbidden("A key that is restricted to corpora cannot have webhooks for all of them.")
    with parts.catalogue.write() as session:
        ids = None if wanted is None else sorted({corpora.find_named(session, who, each).id for each in wanted})
        if len(session.scalars(select(Webhook.id).where(Webhook.tenant_id == who.tenant_id)).all()) >= MOST:
            raise UserError(f"there are {MOST} webhooks already; remove one first")
        now = parts.clock()
        row = Webhook(
            id=new_id("wh"), tenant_id=who.tenant_id, url=url, events=sorted(set(events or EVENTS)), corpora=ids,
            created_at=now, looked_at=now,
        )  # fmt: skip
        session.add(row)
        session.flush()
        audit(session, who, "webhook.add", row.id, now)
        return {**_shape(row), "secret": webhook_secret(parts.secret, row.id)}


def show_all(parts: ApiParts, who: Principal) -> list[dict[str, Any]]:
    """All webhooks that the asker may administer, oldest first."""
    query = select(Webhook).where(Webhook.tenant_id == who.tenant_id).order_by(Webhook.created_at, Webhook.id)
    with parts.catalogue.read() as session:
        return [_shape(row) for row in session.scalars(query) if _within(who, row)]


def show(parts: ApiParts, who: Principal, webhook_id: str) -> dict[str, Any]:
    """One webhook with its newest deliveries. Raises NotFound."""
    with parts.catalogue.read() as session:
        row = find(session, who, webhook_id)
        newest = select(WebhookDelivery).where(WebhookDelivery.webhook_id == row.id)
        newest = newest.order_by(WebhookDelivery.created_at.desc(), WebhookDelivery.id).limit(SHOWN)
        return {**_shape(row), "deliveries": [_delivery(each) for each in session.scalars(newest)]}


def remove(parts: ApiParts, who: Principal, webhook_id: str) -> None:
    """Tell an address nothing any more, not even what is on its way. Raises NotFound."""
    with parts.catalogue.write() as session:
        row = find(session, who, webhook_id)
        session.execute(delete(WebhookDelivery).where(WebhookDelivery.webhook_id == row.id))
        session.delete(row)
        audit(session, who, "webhook.remove", webhook_id, parts.clock())


def _within(who: Principal, row: Webhook) -> bool:
    return who.corpora is None or (row.corpora is not None and who.corpora.issuperset(row.corpora))


def _shape(row: Webhook) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "webhook",
        "url": row.url,
        "events": row.events,
        "corpora": row.corpora,
        "created_at": row.created_at,
    }


def _delivery(row: WebhookDelivery) -> dict[str, Any]:
    return {
        "id": row.id,
        "type": row.payload["type"],
        "job_id": row.job_id,
        "status": row.status,
        "attempts": row.attempt,
        "answer": row.answer,
        "next_at": row.next_at if row.status == "pending" else None,
        "created_at": row.created_at,
        "finished_at": row.finished_at,
    }
