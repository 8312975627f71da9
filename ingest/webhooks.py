"""Webhooks: who asked for it is told of the end of each job, signed as Standard Webhooks (standardwebhooks.com) ask for.

What has ended is found in the catalogue, so that no end is missed whoever brought it about. An event carries ids, states and
counts, never a file's name or text. It arrives at least once: a receiver knows a repeated one by its `webhook-id`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select, update

from ingest.egress import AllowedHosts
from ingest.fetch import Fetcher
from ingest.jobs import new_id
from storage.catalogue.engine import Catalogue
from storage.catalogue.insert import insert_into
from storage.catalogue.schema import Job, Webhook, WebhookDelivery
from storage.errors import PrereadError
from storage.keys import length_prefixed

EVENTS = tuple(f"job.{status}" for status in ("completed", "completed_with_errors", "failed", "cancelled"))
PAUSES = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0)  # seconds before the next attempts; after the last: failed
SEND_SECONDS = 15.0
LEASE_SECONDS = 60.0  # after which another may send what a dead process was sending
OVERLAP_SECONDS = 600.0  # an end may be committed so much later than it is dated
LOOK_SECONDS = 60.0  # how often it is written down how far the look was
KEPT_SECONDS = 30 * 24 * 3600.0
AT_ONCE = 8
TURN_SECONDS = 20.0
BATCH = 500
_TAG = b"preread-webhook-1"


def webhook_secret(master: bytes, webhook_id: str) -> str:
    """The secret under which a webhook's messages are signed: derived, so that no database holds it."""
    raw = hmac.new(master, length_prefixed([_TAG, webhook_id.encode()]), hashlib.sha256).digest()
    return "whsec_" + base64.b64encode(raw).decode("ascii")


def signed(secret: str, message_id: str, at: int, body: bytes) -> dict[str, str]:
    """The three headers of Standard Webhooks."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    mac = hmac.new(key, f"{message_id}.{at}.".encode() + body, hashlib.sha256).digest()
    signature = "v1," + base64.b64encode(mac).decode("ascii")
    return {"webhook-id": message_id, "webhook-timestamp": str(at), "webhook-signature": signature}


def event_of(job: Job) -> dict[str, Any]:
    """What is said of a job that has ended."""
    final = job.result.get("final", {})
    return {
        "id": new_id("evt"),
        "object": "event",
        "type": f"job.{job.status}",
        "created_at": int(job.finished_at or job.created_at),
        "data": {
            "id": job.id,
            "object": "job",
            "type": job.type,
            "status": job.status,
            "corpus_id": job.corpus_id,
            "created_at": job.created_at,
            "finished_at": job.finished_at,
            "progress": final.get("progress", {}),
            "errors_total": len(final.get("errors", ())),
        },
    }


@dataclass(frozen=True)
class Courier:
    """Finds what is to be told, and tells it. Any number of processes may: each message is sent by one at a time."""

    catalogue: Catalogue
    hosts: AllowedHosts
    master: bytes
    clock: Callable[[], float] = time.time

    def tick(self) -> None:
        """Note the jobs that have ended, and send what is due for some seconds."""
        self.collect()
        self._prune()
        end = time.monotonic() + TURN_SECONDS
        while self._send_some() and time.monotonic() < end:
            continue

    def collect(self) -> int:
        """A delivery for each webhook and job that has ended since it was made; how many are new."""
        now = self.clock()
        told = select(WebhookDelivery.id).where(WebhookDelivery.webhook_id == Webhook.id, WebhookDelivery.job_id == Job.id)
        ended = (
            select(Webhook, Job)
            .join(Job, Job.tenant_id == Webhook.tenant_id)
            .where(Job.finished_at >= Webhook.created_at, Job.finished_at > Webhook.looked_at - OVERLAP_SECONDS, ~told.exists())
            .order_by(Job.finished_at, Job.id)
        )
        new = 0
        with self.catalogue.write() as session:
            rows = session.execute(ended).all()
            for webhook, job in rows:
                if f"job.{job.status}" not in webhook.events or not _concerns(webhook, job):
                    continue
                new += 1
                values = {
                    "id": new_id("msg"), "webhook_id": webhook.id, "job_id": job.id, "payload": event_of(job),
                    "status": "pending", "attempt": 0, "next_at": now, "created_at": now,
                }  # fmt: skip
                session.execute(insert_into(session, WebhookDelivery).values(**values).on_conflict_do_nothing())
            session.execute(update(Webhook).where(Webhook.looked_at < now - LOOK_SECONDS).values(looked_at=now))
        return new

    def _prune(self) -> None:
        over = WebhookDelivery.finished_at < self.clock() - KEPT_SECONDS
        with self.catalogue.read() as session:
            if session.scalars(select(WebhookDelivery.id).where(over).limit(1)).first() is None:
                return
        with self.catalogue.write() as session:
            session.execute(delete(WebhookDelivery).where(over))

    def _send_some(self) -> bool:
        """Send one message to each of some addresses at once, so that one that hangs holds up no other; whether any was due."""
        taken = self._claim()
        if taken:
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="webhook") as pool:
                list(pool.map(self._send, taken))
        return bool(taken)

    def _claim(self) -> list[tuple[WebhookDelivery, str]]:
        now = self.clock()
        due = (
            select(WebhookDelivery.webhook_id)
            .where(WebhookDelivery.status == "pending", WebhookDelivery.next_at <= now)
            .group_by(WebhookDelivery.webhook_id)
            .order_by(func.min(WebhookDelivery.next_at))
            .limit(AT_ONCE)
        )
        with self.catalogue.read() as session:
            waiting = session.scalars(due).all()
        return [taken for webhook_id in waiting if (taken := self._take(webhook_id, now)) is not None]

    def _take(self, webhook_id: str, now: float) -> tuple[WebhookDelivery, str] | None:
        """The webhook's next message and its address, if no other process is faster."""
        next_one = (
            select(WebhookDelivery)
            .where(WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.status == "pending", WebhookDelivery.next_at <= now)
            .order_by(WebhookDelivery.next_at, WebhookDelivery.id)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        with self.catalogue.write() as session:
            row, webhook = session.scalars(next_one).first(), session.get(Webhook, webhook_id)
            if row is None or webhook is None:
                return None
            row.next_at, row.attempt = now + LEASE_SECONDS, row.attempt + 1
            session.flush()
            return row, webhook.url

    def _send(self, taken: tuple[WebhookDelivery, str]) -> None:
        row, url = taken
        body = json.dumps(row.payload, ensure_ascii=False, separators=(",", ":")).encode()
        headers = signed(webhook_secret(self.master, row.webhook_id), row.id, int(self.clock()), body)
        fetcher = Fetcher(self.hosts)
        try:
            reply = fetcher.post(
                url, body, max_bytes=1 << 16, seconds=SEND_SECONDS, headers={**headers, "content-type": "application/json"}
            )
            done, answer = 200 <= reply.status < 300, f"HTTP {reply.status}"
        except PrereadError as error:
            done, answer = False, str(error)[:200]
        finally:
            fetcher.close()
        self._note(row, done, answer)

    def _note(self, row: WebhookDelivery, done: bool, answer: str) -> None:
        now = self.clock()
        values: dict[str, Any] = {"answer": answer}
        if done or row.attempt > len(PAUSES):
            values |= {"status": "delivered" if done else "failed", "finished_at": now}
        else:
            values["next_at"] = now + PAUSES[row.attempt - 1] * random.uniform(1, 1.2)
        mine = WebhookDelivery.id == row.id, WebhookDelivery.attempt == row.attempt, WebhookDelivery.status == "pending"
        with self.catalogue.write() as session:
            session.execute(update(WebhookDelivery).where(*mine).values(**values))


def _concerns(webhook: Webhook, job: Job) -> bool:
    return webhook.corpora is None or job.corpus_id in webhook.corpora
