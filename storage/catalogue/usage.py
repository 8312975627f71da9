"""Adding to the counters of use. Every process adds in batches: a row is changed by addition, never written over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, exists, func, select
from sqlalchemy.orm import Session, aliased

from storage.catalogue.insert import insert_into
from storage.catalogue.schema import Document, DocumentUse, UsageDay

COUNTS = (
    "answers", "tokens_prompt", "tokens_completion", "tokens_reused", "tokens_recomputed", "bytes_fetched",
    "tokens_compiled", "seconds_compiled",
)  # fmt: skip
Place = tuple[int, str, str]  # day, tenant, corpus
TASKS = "tasks"  # in the place of a corpus: what a chat page asks for itself, such as a conversation's title
BATCH = 200


def add_usage(session: Session, amounts: Mapping[Place, Mapping[str, float]]) -> None:
    """Add to the rows of these places; what is left out of an amount is 0."""
    rows = [
        {"day": day, "tenant_id": tenant, "corpus_id": corpus, **dict.fromkeys(COUNTS, 0), **amounts[day, tenant, corpus]}
        for day, tenant, corpus in sorted(amounts)  # one order for all, so that two transactions never wait for each other
    ]
    for batch in _batches(rows):
        insert = insert_into(session, UsageDay).values(batch)
        added = {name: getattr(UsageDay, name) + insert.excluded[name] for name in COUNTS}
        session.execute(insert.on_conflict_do_update(index_elements=["day", "tenant_id", "corpus_id"], set_=added))


def add_uses(session: Session, uses: Mapping[tuple[str, int], tuple[int, float]]) -> None:
    """Add (hits, time of the last one) to (document, day)."""
    rows = [
        {"document_id": document, "day": day, "hits": uses[document, day][0], "last_at": uses[document, day][1]}
        for document, day in sorted(uses)
    ]
    latest = func.max if session.get_bind().dialect.name == "sqlite" else func.greatest
    for batch in _batches(rows):
        insert = insert_into(session, DocumentUse).values(batch)
        changed = {
            "hits": DocumentUse.hits + insert.excluded.hits,
            "last_at": latest(DocumentUse.last_at, insert.excluded.last_at),
        }
        session.execute(insert.on_conflict_do_update(index_elements=["document_id", "day"], set_=changed))


def used_since(session: Session, since: float) -> dict[str, float]:
    """Documents that answers have used after this time, and when last. As long as the counters' writers take, it is late."""
    last = func.max(DocumentUse.last_at)
    query = select(DocumentUse.document_id, last).where(DocumentUse.last_at > since).group_by(DocumentUse.document_id)
    return {row[0]: row[1] for row in session.execute(query)}


def forget_uses(session: Session, before_day: int) -> None:
    """Drop the uses of days that no rule can ask for any more, and of documents that are gone. A document's last use stays."""
    newer = aliased(DocumentUse)
    superseded = exists().where(newer.document_id == DocumentUse.document_id, newer.day > DocumentUse.day)
    session.execute(delete(DocumentUse).where(DocumentUse.day < before_day, superseded))
    session.execute(delete(DocumentUse).where(DocumentUse.document_id.not_in(select(Document.id))))


def _batches(rows: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
