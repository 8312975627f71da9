"""The policy's hand in the process that has tiers: it pins, keeps and prefetches KV in this process's own.

Memory belongs to a process, so each does this for itself; nothing is coordinated and nothing need be. An API process without
tiers, since vLLM has them, only looks at what the rules say, for who asks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.catalogue.engine import Catalogue
from storage.catalogue.facts import facts_of, page_of
from storage.catalogue.schema import ChunkRow, Corpus, Document, KVObject
from storage.codecs import CODECS
from storage.cron import next_due
from storage.policy.file import PolicyFile
from storage.policy.rules import Policy
from storage.policy.types import ACTIONS, DEFAULT_RULE, TIERS, Decision, DocumentFacts, Prefetch
from storage.tier_control import TierControl

PASS_SECONDS = 30.0  # between two looks at all documents of which something is said
PASS_SHARE = 0.1  # of the time at most may be spent on such looks
BATCH = 500
Told = Mapping[str, Mapping[str, Mapping[str, int]]]  # corpus id → action → rule → documents


@dataclass
class _Seen:
    """What one pass over the documents found."""

    pinned: dict[str, set[str]] = field(default_factory=lambda: {tier: set() for tier in TIERS})  # keys by tier
    prefetches: set[Prefetch] = field(default_factory=set)
    codecs: dict[str, str] = field(default_factory=dict)  # of copies on disk, by key
    told: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    told_of: dict[str, dict[str, dict[str, Counter[str]]]] = field(default_factory=dict)  # tier → as `told`

    def note(self, corpus_id: str, decision: Decision) -> None:
        by_action = self.told.setdefault(corpus_id, {})
        for action in ACTIONS:
            by_action.setdefault(action, Counter())[decision.by.get(action, DEFAULT_RULE)] += 1
        for action, rule in decision.by.items():
            if (tier := decision.actions.tier(action)) is not None:
                in_tier = self.told_of.setdefault(tier, {}).setdefault(corpus_id, {})
                in_tier.setdefault(action, Counter())[rule] += 1


class Placement:
    """One per process. `tick` does its work and belongs to one thread; all else may be called by any."""

    def __init__(
        self, catalogue: Catalogue, policy: PolicyFile, tiers: TierControl, clock: Callable[[], float] = time.time
    ) -> None:
        self._catalogue, self.policy, self.tiers, self._clock = catalogue, policy, tiers, clock
        self._version, self._next_pass, self._at = "", 0.0, 0.0
        self._seen = _Seen()
        self._due: dict[Prefetch, float] = {}
        self._pinned: dict[str, set[str]] = {tier: set() for tier in TIERS}  # as the tiers were told
        self._kept: dict[str, dict[str, float]] = {tier: {} for tier in TIERS}  # key → until when
        self._used: dict[str, tuple[str, float]] = {}  # key → document and when, since the last tick
        self._lock = threading.Lock()

    def used(self, uses: Mapping[str, str]) -> None:
        """An answer used these keys (→ their documents). Costs no look-up now."""
        now = self._clock()
        with self._lock:
            self._used.update({key: (document_id, now) for key, document_id in uses.items()})

    def told(self) -> Told:
        """What the last pass found to be said, by which rule and of how many documents."""
        return self._seen.told

    def told_of(self, tier: str) -> Told:
        """The part of it that brings KV into a tier, or shapes what lies there; without what no rule says."""
        return self._seen.told_of.get(tier, {})

    def pinned(self, tier: str) -> Collection[str]:
        """The keys that are pinned in a tier now, by a rule or for a while after use."""
        return frozenset(self._pinned[tier])

    def tick(self) -> None:
        """Look at the policy and the clock, and tell the tiers what has changed."""
        policy, now = self.policy.current(), self._clock()
        if now < self._at:
            self._turn_back(self._at - now)
        self._at = now
        look = self._version != self.policy.version or now >= self._next_pass
        if look:
            begun = time.monotonic()
            self._version = self.policy.version
            self._seen = self._pass(policy, now)
            self._due = {p: self._due.get(p) or next_due(p.cron, p.timezone, now) for p in self._seen.prefetches}
            self.tiers.keep_as(self._seen.codecs)  # before pins, whose copies come as they are to lie
            self._next_pass = now + max(PASS_SECONDS, (time.monotonic() - begun) / PASS_SHARE)
        self._keep(policy)
        for tier in self.tiers.tiers:
            self._pin(tier, now, again=look)
        for prefetch in [p for p, due in self._due.items() if due <= now]:
            self._due[prefetch] = next_due(prefetch.cron, prefetch.timezone, now)
            if prefetch.tier in self.tiers.tiers:
                self._fetch(policy, prefetch, now)

    def _turn_back(self, seconds: float) -> None:
        """The clock was set back: what is to happen at a time of the earlier clock would wait, or hold, for so much longer."""
        self._next_pass, self._due = 0.0, {}
        for kept in self._kept.values():
            kept.update({key: until - seconds for key, until in kept.items()})

    # --- what the policy says ---

    def _pass(self, policy: Policy, now: float) -> _Seen:
        seen = _Seen()
        if not policy.speaks_of(*ACTIONS):
            return seen
        codecs: dict[str, str] = {}
        for decided in self._decided(policy, now):
            pinned: dict[str, list[str]] = {}
            for facts, decision in decided:
                seen.note(facts.corpus_id, decision)
                if decision.actions.prefetch is not None:
                    seen.prefetches.add(decision.actions.prefetch)
                if decision.actions.disk_codec is not None:
                    codecs[facts.document_id] = decision.actions.disk_codec
                if decision.actions.pin is not None:
                    pinned.setdefault(decision.actions.pin, []).append(facts.document_id)
            for tier, documents in pinned.items():
                seen.pinned[tier].update(self._keys(documents))
        seen.codecs = self._codecs(codecs)
        return seen

    def _decided(self, policy: Policy, now: float) -> Iterator[list[tuple[DocumentFacts, Decision]]]:
        """All documents of which something is said, a page at a time."""
        with self._catalogue.read() as session:
            named = session.execute(select(Corpus.id, Corpus.name)).all()
        corpora = [corpus_id for corpus_id, name in named if policy.reaches(corpus_id, name)]
        after = ""
        while corpora:
            with self._catalogue.read() as session:  # one snapshot a page: a pass may take long
                page = page_of(session, corpora, after)
                facts = facts_of(session, page, policy.needs_use)
            if not page:
                return
            after = page[-1][0].id
            yield [(each, policy.decide(each, now)) for each in facts]

    def _keys(self, documents: Sequence[str]) -> set[str]:
        """The keys under which documents' KV is stored by now."""
        keys: set[str] = set()
        for at in range(0, len(documents), BATCH):
            query = select(ChunkRow.kv_key).join(KVObject, KVObject.key == ChunkRow.kv_key)
            query = query.where(ChunkRow.document_id.in_(documents[at : at + BATCH]), KVObject.status == "done")
            with self._catalogue.read() as session:
                keys.update(key for key in session.scalars(query) if key is not None)
        return keys

    def _codecs(self, by_document: Mapping[str, str]) -> dict[str, str]:
        """By key, for copies on disk. A text that several documents have is kept as the most exact of their rules says, and
        as the stored object is where there is none for one of them."""
        found: dict[str, set[str | None]] = {}
        keys = sorted(self._keys(list(by_document)))
        for at in range(0, len(keys), BATCH):
            query = select(ChunkRow.kv_key, ChunkRow.document_id).where(ChunkRow.kv_key.in_(keys[at : at + BATCH]))
            with self._catalogue.read() as session:
                for key, document_id in session.execute(query):
                    found.setdefault(str(key), set()).add(by_document.get(document_id))
        return {key: next(name for name in CODECS if name in said) for key, said in found.items() if None not in said}

    # --- what the tiers are told ---

    def _keep(self, policy: Policy) -> None:
        """Hold what was used since the last tick for as long as its document's rule says."""
        with self._lock:
            used, self._used = self._used, {}
        if not used or not self.tiers.tiers or not policy.speaks_of("keep"):
            return
        ids = sorted({document_id for document_id, _ in used.values()})
        with self._catalogue.read() as session:
            rows = _documents(session, ids)
            facts = facts_of(session, rows, policy.needs_use)
        keeps = {each.document_id: policy.decide(each, self._clock()).actions.keep for each in facts}
        for key, (document_id, at) in used.items():
            if (keep := keeps.get(document_id)) is not None and keep.tier in self.tiers.tiers:
                self._kept[keep.tier][key] = at + keep.seconds

    def _pin(self, tier: str, now: float, again: bool) -> None:
        """Tell a tier what is to be pinned now; with `again` also what was told before and is not there."""
        self._kept[tier] = {key: until for key, until in self._kept[tier].items() if until > now}
        wanted = self._seen.pinned[tier] | self._kept[tier].keys()
        self.tiers.unpin(tier, self._pinned[tier] - wanted)
        missing = wanted - self.tiers.held(tier).keys() if again and wanted else set()
        self.tiers.pin(tier, missing | (wanted - self._pinned[tier]))
        self._pinned[tier] = wanted

    def _fetch(self, policy: Policy, prefetch: Prefetch, now: float) -> None:
        for decided in self._decided(policy, now):
            keys = self._keys([facts.document_id for facts, decision in decided if decision.actions.prefetch == prefetch])
            if self.tiers.prefetch(prefetch.tier, keys) < len(keys):
                return  # there is no more room


def _documents(session: Session, ids: Sequence[str]) -> list[tuple[Document, str]]:
    found: list[tuple[Document, str]] = []
    for at in range(0, len(ids), BATCH):
        query = select(Document, Corpus.name).join(Corpus, Corpus.id == Document.corpus_id)
        found += [(d, name) for d, name in session.execute(query.where(Document.id.in_(ids[at : at + BATCH])))]
    return found


def decide(catalogue: Catalogue, policy: Policy, document: Document, corpus: Corpus, now: float) -> Decision:
    """What holds for one document now."""
    with catalogue.read() as session:
        [facts] = facts_of(session, [(document, corpus.name)], policy.needs_use)
    return policy.decide(facts, now)
