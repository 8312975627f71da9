"""Pushes: a git host tells that a repository has changed, and its corpus is synced.

A push while a sync runs leads to one more sync when that one has ended, however many pushes there were; a sync that waits and
has not begun to list its source will see the push anyway, so that nothing is added to it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from ingest.sync import queue_sync, running_syncs
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, PushDelivery, PushHook
from storage.errors import Overloaded, UserError
from storage.keys import length_prefixed

MOST_A_MINUTE = 30  # good deliveries of one hook
KEPT_SECONDS = 30 * 24 * 3600.0  # a delivery that comes again is known for so long; after that it costs one sync
_TAG = b"preread-push-hook-1"
_PUSHES = ("push", "Push Hook", "Tag Push Hook")


@dataclass(frozen=True)
class GitHost:
    """How a kind of host shows that it knows the secret. Names of headers are in lower case."""

    name: str
    proof_header: str
    proof: Callable[[str, bytes], str]
    event_header: str
    delivery_header: str
    signs_body: bool = True


def _hex(secret: str, body: bytes) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


# The first whose header is there is the one that must be right. Gitea and Forgejo send GitHub's headers too.
HOSTS = (
    GitHost("github", "x-hub-signature-256", lambda s, b: f"sha256={_hex(s, b)}", "x-github-event", "x-github-delivery"),
    GitHost("forgejo", "x-forgejo-signature", _hex, "x-forgejo-event", "x-forgejo-delivery"),
    GitHost("gitea", "x-gitea-signature", _hex, "x-gitea-event", "x-gitea-delivery"),
    GitHost("gitlab", "x-gitlab-token", lambda s, b: s, "x-gitlab-event", "x-gitlab-event-uuid", signs_body=False),
)


def hook_secret(master: bytes, hook_id: str) -> str:
    """The secret that a hook shares with its git host: derived, so that no database holds it."""
    raw = hmac.new(master, length_prefixed([_TAG, hook_id.encode()]), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")


@dataclass(frozen=True)
class Push:
    """A delivery that has shown that it knows the secret."""

    event: str
    delivery_id: str
    digest: str
    body: Mapping[str, Any]

    @classmethod
    def admitted(cls, secret: str, headers: Mapping[str, str], body: bytes) -> Push | None:
        """None unless it is proven, in constant time. Raises UserError for a proven one that is no JSON."""
        host = next((each for each in HOSTS if each.proof_header in headers), None)
        if host is None:
            return None
        given = headers[host.proof_header].encode("utf-8", "replace")
        if not hmac.compare_digest(host.proof(secret, body).encode(), given):
            return None
        delivery = headers.get(host.delivery_header, "")
        # The delivery's id is not signed: whoever repeats a request may change it.
        proven = [body] if host.signs_body else [body, delivery.encode("utf-8", "replace")]
        digest = hashlib.sha256(length_prefixed(proven)).hexdigest()
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise UserError("the delivery is no JSON: choose the content type application/json at the git host") from None
        event = headers.get(host.event_header, "")
        return cls(event, delivery[:64], digest, found if isinstance(found, dict) else {})

    def concerns(self, source: Mapping[str, Any]) -> bool:
        """Whether it changed what the source names: a branch or tag, or the repository's default branch."""
        if self.event not in _PUSHES:
            return False
        ref, wanted = str(self.body.get("ref", "")), str(source.get("ref", "HEAD"))
        if source.get("type") != "git":
            return True
        if wanted == "HEAD":
            about = self.body.get("repository") or {}, self.body.get("project") or {}
            default = next((each["default_branch"] for each in about if "default_branch" in each), None)
            return default is None or ref == f"refs/heads/{default}"
        return ref in (wanted, f"refs/heads/{wanted}", f"refs/tags/{wanted}")


def receive(session: Session, hook: PushHook, push: Push, now: float) -> PushDelivery:
    """What a push leads to, written down; a repeated one leads to nothing new. `hook` is locked.

    Raises Overloaded, or UserError for a corpus without a source."""
    known = session.get(PushDelivery, (hook.id, push.digest))
    if known is not None:
        return known
    recent = select(func.count()).where(PushDelivery.hook_id == hook.id, PushDelivery.at > now - 60)
    if (session.scalar(recent) or 0) >= MOST_A_MINUTE:
        raise Overloaded("too many deliveries in a minute; the next sync will see this push too")
    corpus = session.get_one(Corpus, hook.corpus_id)
    row = PushDelivery(hook_id=hook.id, digest=push.digest, delivery_id=push.delivery_id, at=now, outcome="ignored")
    if push.concerns(corpus.source or {}):
        row.outcome, row.job_id = _start(session, hook, corpus)
    session.add(row)
    session.flush()
    return row


def _start(session: Session, hook: PushHook, corpus: Corpus) -> tuple[str, str | None]:
    running = running_syncs(session, corpus.id)
    if not running:
        return "started", queue_sync(session, corpus, {"hook_id": hook.id}).id
    waiting = next((job for job in running if job.stage == "fetch" and not job.attempt and job.lease_owner is None), None)
    if waiting is not None:
        return "skipped_overlap", waiting.id
    hook.again = True
    return "follows", None


def follow(catalogue: Catalogue, ring: Callable[[str], None], now: float) -> int:
    """Start the syncs that were put off until another had ended; how many. Forget old deliveries."""
    with catalogue.read() as session:
        ids = session.scalars(select(PushHook.id).where(PushHook.again)).all()
        old = session.scalars(select(PushDelivery.digest).where(PushDelivery.at < now - KEPT_SECONDS).limit(1)).first()
    started = 0
    for hook_id in ids:
        with catalogue.write() as session:
            started += _follow(session, hook_id)
    if old is not None:
        with catalogue.write() as session:
            session.execute(delete(PushDelivery).where(PushDelivery.at < now - KEPT_SECONDS))
    if started:
        ring("ingest")
    return started


def _follow(session: Session, hook_id: str) -> bool:
    query = select(PushHook).where(PushHook.id == hook_id, PushHook.again).with_for_update(skip_locked=True)
    hook = session.scalars(query).first()
    if hook is None or running_syncs(session, hook.corpus_id):
        return False
    hook.again = False
    corpus = session.get(Corpus, hook.corpus_id)
    if corpus is None or corpus.source is None:
        return False
    queue_sync(session, corpus, {"hook_id": hook.id})
    return True
