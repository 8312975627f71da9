"""What lies where, derived by query: never counted up and down. A chunk that two corpora share counts in each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from storage.catalogue.schema import ChunkRow, Document, KVObject, UsageDay
from storage.catalogue.usage import COUNTS

BATCH = 500
Owner = tuple[str, str]  # tenant, corpus


@dataclass(frozen=True)
class Holding:
    """Distinct KV objects and their bytes."""

    chunks: int = 0
    bytes: int = 0

    def __add__(self, other: Holding) -> Holding:
        return Holding(self.chunks + other.chunks, self.bytes + other.bytes)


def stored(session: Session, *where: ColumnElement[bool]) -> dict[Owner, Holding]:
    """What the object store holds of chunks that fit the conditions."""
    each = select(ChunkRow.tenant_id, ChunkRow.corpus_id, KVObject.key, KVObject.bytes)
    each = each.join(KVObject, KVObject.key == ChunkRow.kv_key).where(KVObject.status == "done", *where)
    one = each.distinct().subquery()
    query = select(one.c.tenant_id, one.c.corpus_id, func.count(), func.sum(one.c.bytes))
    grouped = session.execute(query.group_by(one.c.tenant_id, one.c.corpus_id))
    return {(tenant, corpus): Holding(count, int(size)) for tenant, corpus, count, size in grouped}


def of_keys(session: Session, keys: Collection[str], *where: ColumnElement[bool]) -> dict[Owner, Holding]:
    """The same of these keys alone: what a tier holds that knows no corpora."""
    found: dict[Owner, Holding] = {}
    ordered = sorted(keys)
    for at in range(0, len(ordered), BATCH):
        some = ChunkRow.kv_key.in_(ordered[at : at + BATCH])
        for owner, holding in stored(session, some, *where).items():
            found[owner] = found.get(owner, Holding()) + holding
    return found


def of_copies(session: Session, sizes: Mapping[str, int], *where: ColumnElement[bool]) -> dict[Owner, Holding]:
    """What a tier holds of chunks that fit the conditions: `sizes` are the bytes that copies take there, by key."""
    found: dict[Owner, Holding] = {}
    ordered = sorted(sizes)
    for at in range(0, len(ordered), BATCH):
        query = select(ChunkRow.tenant_id, ChunkRow.corpus_id, KVObject.key).join(KVObject, KVObject.key == ChunkRow.kv_key)
        query = query.where(KVObject.key.in_(ordered[at : at + BATCH]), KVObject.status == "done", *where)
        for tenant, corpus, key in session.execute(query.distinct()):
            found[tenant, corpus] = found.get((tenant, corpus), Holding()) + Holding(1, sizes[key])
    return found


def kept_out(session: Session, *where: ColumnElement[bool]) -> dict[str, dict[str, int]]:
    """Corpus → rule → documents whose KV the rule keeps out of the store."""
    query = select(Document.corpus_id, Document.not_stored, func.count()).where(Document.not_stored.is_not(None), *where)
    found: dict[str, dict[str, int]] = {}
    for corpus_id, rule, count in session.execute(query.group_by(Document.corpus_id, Document.not_stored)):
        found.setdefault(corpus_id, {})[str(rule)] = count
    return found


def used(session: Session, *where: ColumnElement[bool]) -> dict[Owner, Mapping[str, float]]:
    """The counters of `usage_day`, summed by owner."""
    query = select(UsageDay.tenant_id, UsageDay.corpus_id, *_sums()).where(*where)
    rows = session.execute(query.group_by(UsageDay.tenant_id, UsageDay.corpus_id)).all()
    return {(row[0], row[1]): _counts(row[2:]) for row in rows}


def prefill_speed(session: Session) -> float | None:
    """Tokens per second at which this installation's workers have computed KV; None before the first."""
    tokens, seconds = session.execute(
        select(func.sum(UsageDay.tokens_compiled), func.sum(UsageDay.seconds_compiled))
    ).one()
    return float(tokens) / float(seconds) if tokens and seconds else None


def _sums() -> list[ColumnElement[int]]:
    return [func.sum(getattr(UsageDay, name)).label(name) for name in COUNTS]


def _counts(values: Sequence[Any]) -> dict[str, float]:
    """COUNTS by name; PostgreSQL sums whole numbers as decimals."""
    return {
        name: float(value) if name.startswith("seconds") else int(value) for name, value in zip(COUNTS, values, strict=True)
    }
