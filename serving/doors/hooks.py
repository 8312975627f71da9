"""Where git hosts tell of pushes: made by an admin of the corpus, opened by what the host signs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.jobs import new_id
from ingest.pushes import Push, hook_secret, receive
from serving.api.parts import ApiParts
from serving.auth import Principal, Unauthorized, audit
from serving.doors import corpora
from storage.catalogue.schema import PushDelivery, PushHook
from storage.errors import NotFound, UserError

SHOWN = 20


def make(parts: ApiParts, who: Principal, corpus_id: str) -> dict[str, Any]:
    """The corpus's hook, in place of an earlier one. Only this answer holds its secret. Raises NotFound, UserError."""
    with parts.catalogue.write() as session:
        corpus = corpora.find(session, who, corpus_id)
        if corpus.source is None:
            raise UserError("only a corpus with a source can be synced when something is pushed")
        _drop(session, corpus_id)
        now = parts.clock()
        hook = PushHook(
            id=new_id("hook"), tenant_id=corpus.tenant_id, corpus_id=corpus_id, again=False, created_at=now
        )  # fmt: skip
        session.add(hook)
        session.flush()
        audit(session, who, "corpus.hook", hook.id, now)
        return {**_shape(hook), "secret": hook_secret(parts.secret, hook.id)}


def show(parts: ApiParts, who: Principal, corpus_id: str) -> dict[str, Any]:
    """The corpus's hook with the newest deliveries. Raises NotFound."""
    with parts.catalogue.read() as session:
        hook = _of(session, who, corpus_id)
        newest = select(PushDelivery).where(PushDelivery.hook_id == hook.id).order_by(PushDelivery.at.desc()).limit(SHOWN)
        return {**_shape(hook), "deliveries": [_delivery(each) for each in session.scalars(newest)]}


def remove(parts: ApiParts, who: Principal, corpus_id: str) -> str:
    """Heed no more pushes; the removed hook's id. Raises NotFound."""
    with parts.catalogue.write() as session:
        hook = _of(session, who, corpus_id)
        _drop(session, corpus_id)
        audit(session, who, "corpus.hook.remove", hook.id, parts.clock())
        return hook.id


def deliver(parts: ApiParts, hook_id: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """What a git host's delivery leads to. Raises Unauthorized, the same for an unknown hook and a wrong secret; UserError,
    Overloaded."""
    push = Push.admitted(hook_secret(parts.secret, hook_id), headers, body)
    refused = Unauthorized("No such hook, or its secret was not shown.")
    if push is None:  # before anything is locked: anybody may come this far
        raise refused
    with parts.catalogue.write() as session:
        hook = session.get(PushHook, hook_id, with_for_update=True)
        if hook is None:
            raise refused
        if push.event == "ping":
            return {"object": "push", "outcome": "ping", "job_id": None}
        done = receive(session, hook, push, parts.clock())
        shown = {"object": "push", "outcome": done.outcome, "job_id": done.job_id}
    if shown["outcome"] == "started":
        parts.ring("ingest")
    return shown


def _of(session: Session, who: Principal, corpus_id: str) -> PushHook:
    corpora.find(session, who, corpus_id)
    hook: PushHook | None = session.scalars(select(PushHook).where(PushHook.corpus_id == corpus_id)).first()
    if hook is None:
        raise NotFound("This vector store has no hook.")
    return hook


def _drop(session: Session, corpus_id: str) -> None:
    ids = select(PushHook.id).where(PushHook.corpus_id == corpus_id)
    session.execute(delete(PushDelivery).where(PushDelivery.hook_id.in_(ids)))
    session.execute(delete(PushHook).where(PushHook.corpus_id == corpus_id))


def _shape(hook: PushHook) -> dict[str, Any]:
    return {
        "id": hook.id,
        "object": "corpus.hook",
        "corpus_id": hook.corpus_id,
        "path": f"/hooks/{hook.id}",
        "created_at": hook.created_at,
    }


def _delivery(row: PushDelivery) -> dict[str, Any]:
    return {"delivery_id": row.delivery_id, "at": row.at, "outcome": row.outcome, "job_id": row.job_id}
