"""/v1/webhooks: addresses that are told of the ends of jobs, for admins."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from serving.api.access import Admin, Parts, deleted
from serving.api.bodies import Body
from serving.api.json_body import StrictJSON
from serving.api.shapes import work
from serving.api.shapes.common import Deleted, told
from serving.doors import webhooks
from serving.doors.paging import listing

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], route_class=StrictJSON)
Event = Literal["job.completed", "job.completed_with_errors", "job.failed", "job.cancelled"]


class WebhookBody(Body):
    url: Annotated[str, Field(min_length=1, max_length=2000, json_schema_extra={"pattern": r"^https?://[a-z0-9.-]+(/|$)"})]
    events: Annotated[list[Event], Field(min_length=1)] | None = None
    corpora: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None


@router.post("", responses=told(work.NewWebhook))
def create_webhook(parts: Parts, who: Admin, body: WebhookBody) -> dict[str, Any]:
    return webhooks.add(parts, who, body.url, body.events, body.corpora)


@router.get("", responses=told(work.WebhookList))
def list_webhooks(parts: Parts, who: Admin) -> dict[str, Any]:
    return listing(webhooks.show_all(parts, who), has_more=False)


@router.get("/{webhook_id}", responses=told(work.WebhookWithDeliveries))
def retrieve_webhook(parts: Parts, who: Admin, webhook_id: str) -> dict[str, Any]:
    return webhooks.show(parts, who, webhook_id)


@router.delete("/{webhook_id}", responses=told(Deleted))
def delete_webhook(parts: Parts, who: Admin, webhook_id: str) -> dict[str, Any]:
    webhooks.remove(parts, who, webhook_id)
    return deleted(webhook_id, "webhook")
