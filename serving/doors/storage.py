"""What of a tenant's KV lies where, which rule says so, and what it costs and saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement
from sqlalchemy.orm import Session

from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors import corpora
from serving.economics import balance, month_cost
from storage.catalogue import holdings
from storage.catalogue.holdings import Holding
from storage.catalogue.schema import ChunkRow, Corpus, Document, UsageDay
from storage.catalogue.usage import COUNTS
from storage.policy.rules import Rates

ByTier = dict[str, dict[str, Holding]]
OBJECT = "object"  # the tier that holds everything


def show(parts: ApiParts, who: Principal) -> dict[str, Any]:
    """Every corpus that the key sees. `memory` is that of the process that answers; `pinned` counts what lies or is to lie
    there by a rule; `codecs` the chunks whose copies came through another codec than the object's."""
    file, told = parts.placement.policy, parts.placement.told()
    rates = file.current().rates
    with parts.catalogue.read() as session:
        rows = list(session.scalars(corpora.visible(who).order_by(Corpus.created_at, Corpus.id)))
        ids = [row.id for row in rows]
        tiers, pinned = by_tier(parts, session, who, ids), _pinned(parts, session, who, ids)
        recoded = _recoded(parts, session, who, ids)
        kept_out = holdings.kept_out(session, Document.tenant_id == who.tenant_id)
        used = holdings.used(session, UsageDay.tenant_id == who.tenant_id)
        speed = holdings.prefill_speed(session)
    shown = []
    for row in rows:
        held = {tier: in_tier.get(row.id, Holding()) for tier, in_tier in tiers.items()}
        counts = used.get((who.tenant_id, row.id), dict.fromkeys(COUNTS, 0))
        said = {action: dict(rules) for action, rules in told.get(row.id, {}).items()}
        shown.append(
            {
                "corpus_id": row.id,
                "name": row.name,
                "tiers": {
                    tier: _tier(holding, pinned.get(tier, {}).get(row.id))
                    | ({} if tier == OBJECT else {"codecs": recoded[tier].get(row.id, {})})
                    for tier, holding in held.items()
                },
                "rules": said,
                "not_stored": kept_out.get(row.id, {}),
                "tokens_not_recomputed": counts["tokens_reused"],
                **balance(counts, rates, speed).shown(rates),
                "cost_per_month": cost_of(held, rates),
            }
        )
    return {
        "object": "storage",
        "policy": {"version": file.version, "status": "outdated" if file.error else "ok"},
        "prefill_tokens_per_s": {"given": rates.prefill_tokens_per_s, "measured": speed},
        "corpora": shown,
    }


def by_tier(parts: ApiParts, session: Session, who: Principal, corpus_ids: Sequence[str]) -> ByTier:
    """Tier → corpus → what lies there, in the bytes that it takes there."""
    tiers, own = parts.placement.tiers, _own(who, corpus_ids)
    sizes = {tier: {key: each.bytes for key, each in tiers.held(tier).items()} for tier in tiers.tiers}
    held = {tier: holdings.of_copies(session, some, *own) for tier, some in sizes.items()}
    return _by_corpus({OBJECT: holdings.stored(session, *own), **held})


def _recoded(
    parts: ApiParts, session: Session, who: Principal, corpus_ids: Sequence[str]
) -> dict[str, dict[str, dict[str, int]]]:
    """Tier → corpus → codec → chunks whose numbers there came through it, where it is another than the object's."""
    found: dict[str, dict[str, dict[str, int]]] = {tier: {} for tier in parts.placement.tiers.tiers}
    for tier, corpora_of in found.items():
        by_codec: dict[str, list[str]] = {}
        for key, held in parts.placement.tiers.held(tier).items():
            if held.codec:
                by_codec.setdefault(held.codec, []).append(key)
        for codec, keys in sorted(by_codec.items()):
            for (_, corpus), holding in holdings.of_keys(session, keys, *_own(who, corpus_ids)).items():
                corpora_of.setdefault(corpus, {})[codec] = holding.chunks
    return found


def _pinned(parts: ApiParts, session: Session, who: Principal, corpus_ids: Sequence[str]) -> ByTier:
    place = parts.placement
    return _by_corpus(
        {tier: holdings.of_keys(session, place.pinned(tier), *_own(who, corpus_ids)) for tier in place.tiers.tiers}
    )


def _own(who: Principal, corpus_ids: Sequence[str]) -> tuple[ColumnElement[bool], ...]:
    return ChunkRow.tenant_id == who.tenant_id, ChunkRow.corpus_id.in_(corpus_ids)


def _by_corpus(found: Mapping[str, Mapping[holdings.Owner, Holding]]) -> ByTier:
    return {tier: {corpus: holding for (_, corpus), holding in held.items()} for tier, held in found.items()}


def _tier(held: Holding, pinned: Holding | None) -> dict[str, int]:
    return {"chunks": held.chunks, "bytes": held.bytes, "pinned": pinned.chunks if pinned else 0}


def cost_of(held: Mapping[str, Holding], rates: Rates) -> float:
    """What it costs to leave it there for 30 days."""
    return round(month_cost({tier: holding.bytes for tier, holding in held.items()}, rates), 6)
