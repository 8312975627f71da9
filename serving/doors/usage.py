"""What a tenant's answers reused, by day and corpus, in the shape of OpenAI's usage pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors import corpora, storage
from serving.economics import balance
from storage.catalogue import holdings
from storage.catalogue.holdings import Holding
from storage.catalogue.schema import UsageDay
from storage.catalogue.usage import COUNTS, TASKS
from storage.policy.rules import Rates
from storage.policy.types import DAY


@dataclass(frozen=True)
class Days:
    """From the day of `start` to that of `end`, both in UTC seconds and inclusive, at most `limit` days from the first."""

    start: float
    end: float
    limit: int


def show(parts: ApiParts, who: Principal, days: Days) -> dict[str, Any]:
    """A page of days, oldest first, of the corpora that the key sees; and what is stored of them now."""
    rates = parts.placement.policy.current().rates
    first = int(days.start // DAY)
    last = min(int(days.end // DAY), first + days.limit - 1)
    with parts.catalogue.read() as session:
        speed = holdings.prefill_speed(session)
        rows = _rows(session, who, first, last)
        stored = _stored(parts, session, who, rates)
    buckets = [_bucket(day, [row for row in rows if row.day == day], rates, speed) for day in range(first, last + 1)]
    more = last < int(days.end // DAY)
    return {
        "object": "page",
        "data": buckets,
        "has_more": more,
        "next_page": str((last + 1) * DAY) if more else None,
        "preread": {"stored": stored, "currency": rates.currency or None},
    }


def _rows(session: Session, who: Principal, first: int, last: int) -> Sequence[UsageDay]:
    query = select(UsageDay).where(UsageDay.tenant_id == who.tenant_id, UsageDay.day.between(first, last))
    if who.corpora is not None:
        query = query.where(UsageDay.corpus_id.in_(who.corpora))
    return session.scalars(query.order_by(UsageDay.day, UsageDay.corpus_id)).all()


def _bucket(day: int, rows: Sequence[UsageDay], rates: Rates, speed: float | None) -> dict[str, Any]:
    return {
        "object": "bucket",
        "start_time": day * DAY,
        "end_time": (day + 1) * DAY,
        "results": [_result(row, rates, speed) for row in rows],
    }


def _result(row: UsageDay, rates: Rates, speed: float | None) -> dict[str, Any]:
    counts = {name: getattr(row, name) for name in COUNTS}
    return {
        "object": "usage.result",
        "corpus_id": None if row.corpus_id == TASKS else row.corpus_id or None,
        "kind": "task" if row.corpus_id == TASKS else "answer",
        "num_model_requests": row.answers,
        "input_tokens": row.tokens_prompt,
        "input_cached_tokens": row.tokens_reused,
        "output_tokens": row.tokens_completion,
        "preread": {
            "tokens_recomputed": row.tokens_recomputed,
            "tokens_compiled": row.tokens_compiled,
            "bytes_fetched": row.bytes_fetched,
            **balance(counts, rates, speed).shown(rates),
        },
    }


def _stored(parts: ApiParts, session: Session, who: Principal, rates: Rates) -> list[dict[str, Any]]:
    ids = [row.id for row in session.scalars(corpora.visible(who))]
    tiers = storage.by_tier(parts, session, who, ids)
    found = []
    for corpus_id in sorted(ids):
        held = {tier: in_tier.get(corpus_id, Holding()) for tier, in_tier in tiers.items()}
        size = {tier: holding.bytes for tier, holding in held.items()}
        found.append({"corpus_id": corpus_id, "bytes": size, "cost_per_month": storage.cost_of(held, rates)})
    return found
