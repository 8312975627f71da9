"""Corpora, shown as vector stores."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from serving.api.parts import ApiParts
from serving.auth import Forbidden, Principal, audit
from serving.doors import purges
from serving.doors.paging import Page, listing, window
from storage.catalogue.schema import Corpus, Document
from storage.errors import NotFound, UserError

COUNTED = ("in_progress", "completed", "failed", "cancelled")


def no_corpus(name: str) -> NotFound:
    """The one answer for a corpus that is unknown and one that is not the asker's."""
    return NotFound(f"No such vector store: {name!r}")


def find(session: Session, who: Principal, corpus_id: str) -> Corpus:
    """A corpus by id. Raises NotFound."""
    corpus = session.get(Corpus, corpus_id)
    if corpus is None or corpus.tenant_id != who.tenant_id or not who.sees(corpus.id):
        raise no_corpus(corpus_id)
    return corpus


def visible(who: Principal) -> Select[Any]:
    """All corpora of the principal."""
    query = select(Corpus).where(Corpus.tenant_id == who.tenant_id)
    return query if who.corpora is None else query.where(Corpus.id.in_(who.corpora))


def find_named(session: Session, who: Principal, name: str) -> Corpus:
    """A corpus by id or else by name. Raises NotFound, or UserError if the name is not unique."""
    corpus = session.get(Corpus, name)
    if corpus is not None and corpus.tenant_id == who.tenant_id and who.sees(corpus.id):
        return corpus
    named = session.scalars(visible(who).where(Corpus.name == name).limit(2)).all()
    if not named:
        raise no_corpus(name)
    if len(named) > 1:
        raise UserError(f"several vector stores are named {name!r}: use the id", code="ambiguous_name")
    found: Corpus = named[0]
    return found


def resolve(parts: ApiParts, who: Principal, names: Sequence[str]) -> tuple[str, ...]:
    """The ids of corpora given by id or name. Raises NotFound."""
    with parts.catalogue.read() as session:
        return tuple(dict.fromkeys(find_named(session, who, name).id for name in names))


def names(parts: ApiParts, who: Principal) -> list[tuple[str, str, float]]:
    """(id, name, created_at) of all corpora of the principal, oldest first."""
    with parts.catalogue.read() as session:
        rows = session.scalars(visible(who).order_by(Corpus.created_at, Corpus.id))
        return [(row.id, row.name, row.created_at) for row in rows]


def add(
    session: Session, parts: ApiParts, who: Principal, name: str, metadata: dict[str, Any], description: str | None = None
) -> Corpus:
    """A new corpus in the caller's transaction. Raises Forbidden for a key that could not see it."""
    if who.corpora is not None:
        raise Forbidden("This key is restricted to its vector stores and cannot create others.")
    now = parts.clock()
    corpus = Corpus(
        id=f"vs_{secrets.token_hex(12)}",
        tenant_id=who.tenant_id,
        name=name,
        sharing_group=who.tenant_id,
        source=None,
        attributes=metadata,
        settings={} if description is None else {"description": description},
        created_at=now,
        last_active_at=now,
    )
    session.add(corpus)
    session.flush()
    return corpus


def show_all(parts: ApiParts, who: Principal, page: Page) -> dict[str, Any]:
    """A page of vector stores."""
    with parts.catalogue.read() as session:
        cursor = find(session, who, page.after) if page.after else None
        rows, more = window(session, visible(who), Corpus, page, cursor)
        return listing(shapes(session, rows), more)


def show(parts: ApiParts, who: Principal, corpus_id: str) -> dict[str, Any]:
    """One vector store. Raises NotFound."""
    with parts.catalogue.read() as session:
        return shapes(session, [find(session, who, corpus_id)])[0]


def change(
    parts: ApiParts, who: Principal, corpus_id: str, name: str | None, metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Rename a vector store or replace its metadata; None leaves a field as it is."""
    with parts.catalogue.write() as session:
        corpus = find(session, who, corpus_id)
        corpus.name = corpus.name if name is None else name
        corpus.attributes = corpus.attributes if metadata is None else metadata
        session.flush()
        return shapes(session, [corpus])[0]


def remove(parts: ApiParts, who: Principal, corpus_id: str) -> dict[str, Any]:
    """Delete a corpus and all that was made of it; uploaded files stay. With the receipt. Raises NotFound."""
    with parts.catalogue.write() as session:
        find(session, who, corpus_id)
        audit(session, who, "vector_store.delete", corpus_id, parts.clock())
    receipt = parts.deleter.corpus(who.tenant_id, corpus_id)
    purged = purges.record(parts, who, corpus_id, receipt, {"vector_store_id": corpus_id})
    return {
        "id": corpus_id,
        "object": "vector_store.deleted",
        "deleted": True,
        **purged,
    }


def shapes(session: Session, rows: Sequence[Corpus]) -> list[dict[str, Any]]:
    """Corpora as vector stores, counted in one query."""
    counts: dict[str, dict[str, int]] = {row.id: dict.fromkeys(COUNTED, 0) for row in rows}
    usage = dict.fromkeys(counts, 0)
    query = select(Document.corpus_id, Document.status, func.count(), func.sum(Document.usage_bytes))
    grouped = query.where(Document.corpus_id.in_(counts)).group_by(Document.corpus_id, Document.status)
    for corpus_id, status, count, used in session.execute(grouped):
        counts[corpus_id][status] += count
        usage[corpus_id] += int(used or 0)
    return [_shape(row, counts[row.id], usage[row.id]) for row in rows]


def _shape(row: Corpus, counts: dict[str, int], usage: int) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "vector_store",
        "created_at": int(row.created_at),
        "name": row.name,
        "description": row.settings.get("description"),
        "status": "in_progress" if counts["in_progress"] else "completed",
        "usage_bytes": usage,
        "file_counts": {**counts, "total": sum(counts.values())},
        "last_active_at": int(row.last_active_at),
        "expires_after": None,
        "expires_at": None,
        "metadata": row.attributes,
    }


def created_at(parts: ApiParts, who: Principal, name: str) -> float:
    """When a corpus, by id or name, was made. Raises NotFound."""
    with parts.catalogue.read() as session:
        return find_named(session, who, name).created_at
