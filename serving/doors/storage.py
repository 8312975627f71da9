"""What of a tenant's KV lies where, which rule says so, and what it costs and saves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from storage.policy.types import HOME_TIER

ByTier = dict[str, dict[str, Holding]]


def show(parts: ApiParts, who: Principal) -> dict[str, Any]:
    """Every corpus that the key sees. `memory` is that of the process that answers; `pinned` counts what lies or is to lie
    there by a rule, `refused` those of them that find no room; `codecs` the chunks whose copies came through another codec
    than the object's; a tier's `rules` those that speak of this tier, and of how many documents."""
    file, told = parts.placement.policy, parts.placement.told()
    rates = file.current().rates
    with parts.catalogue.read() as session:
        rows = list(session.scalars(corpora.visible(who).order_by(Corpus.created_at, Corpus.id)))
        ids = [row.id for row in rows]
        tiers, place = by_tier(parts, session, who, ids), parts.placement
        pinned = {tier: _chunks(session, place.pinned(tier), who, ids) for tier in place.tiers.tiers}
        refused = {tier: _chunks(session, place.tiers.refused(tier), who, ids) for tier in place.tiers.tiers}
        recoded = _recoded(parts, session, who, ids)
        kept_out = holdings.kept_out(session, Document.tenant_id == who.tenant_id)
        used = holdings.used(session, UsageDay.tenant_id == who.tenant_id)
        speed = holdings.prefill_speed(session)
    shown = []
    for row in rows:
        held = {tier: in_tier.get(row.id, Holding()) for tier, in_tier in tiers.items()}
        counts = used.get((who.tenant_id, row.id), dict.fromkeys(COUNTS, 0))
        shown.append(
            {
                "corpus_id": row.id,
                "name": row.name,
                "tiers": {
                    tier: {
                        "chunks": holding.chunks,
                        "bytes": holding.bytes,
                        "pinned": pinned.get(tier, {}).get(row.id, 0),
                        "refused": refused.get(tier, {}).get(row.id, 0),
                        "codecs": recoded.get(tier, {}).get(row.id, {}),
                        "rules": _plain(place.told_of(tier).get(row.id, {})),
                    }
                    for tier, holding in held.items()
                },
                "rules": _plain(told.get(row.id, {})),
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
    return _by_corpus({HOME_TIER: holdings.stored(session, *own), **held})


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


def _chunks(session: Session, keys: Collection[str], who: Principal, corpus_ids: Sequence[str]) -> dict[str, int]:
    """Corpus → how many of these keys are stored chunks of it."""
    found = holdings.of_keys(session, keys, *_own(who, corpus_ids))
    return {corpus: holding.chunks for (_, corpus), holding in found.items()}


def _plain(told: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    return {action: dict(rules) for action, rules in told.items()}


def _own(who: Principal, corpus_ids: Sequence[str]) -> tuple[ColumnElement[bool], ...]:
    return ChunkRow.tenant_id == who.tenant_id, ChunkRow.corpus_id.in_(corpus_ids)


def _by_corpus(found: Mapping[str, Mapping[holdings.Owner, Holding]]) -> ByTier:
    return {tier: {corpus: holding for (_, corpus), holding in held.items()} for tier, held in found.items()}


def cost_of(held: Mapping[str, Holding], rates: Rates) -> float:
    """What it costs to leave it there for 30 days."""
    return round(month_cost({tier: holding.bytes for tier, holding in held.items()}, rates), 6)
