"""One prompt's stored KV on its way. It is over for the prompt as soon as all that is worth waiting for has come, or patience
with its sources is at an end (`rates.py`). Reading goes on: what comes later is kept in memory, for the next prompt at least."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from serving.engine.rates import Rates
from storage.deadline import until
from storage.kvstore import KVStore, Records
from storage.tiers.flights import Found, Landed
from storage.types import KVProfile, KVRecord, Miss

DEADLINE_S = 5.0  # then a fetch is given up
IN_MEMORY = ("device", "memory")
SLOW = "slow"  # why a chunk was not used: computing was faster than its source


@dataclass(frozen=True)
class Wanted:
    """A stored chunk. `codec`: as a rule has chosen it; None: the model's own."""

    key: str
    tokens: int
    codec: str | None = None


class Readers:
    """Threads that read. What is in memory waits behind no other source."""

    def __init__(self, threads: int) -> None:
        self._far = ThreadPoolExecutor(threads, thread_name_prefix="kv-fetch")
        self._near = ThreadPoolExecutor(1, thread_name_prefix="kv-near")

    def begin(self, loading: Loading, read: Callable[[Sequence[Wanted]], None]) -> None:
        """Have both parts of what is wanted read; patience begins."""
        for threads, part in ((self._near, loading.near), (self._far, loading.far)):
            if part:
                threads.submit(read, part)
        loading.begin()

    def close(self) -> None:
        for threads in (self._near, self._far):
            threads.shutdown(wait=False, cancel_futures=True)


class Loading:
    """`over()` is called once, by whichever thread it happens in. `meanwhile`: see `Rates`; without it what comes from a tier
    earns it the time that computing it would have taken, so that it is waited for while it keeps up with computing, and
    what is next comes as soon as the first was to."""

    def __init__(
        self, store: KVStore, rates: Rates, wanted: Sequence[Wanted], prefill_tokens_per_s: float | None,
        over: Callable[[], None], *, meanwhile: bool,
    ) -> None:  # fmt: skip
        self._store, self._rates, self._over = store, rates, over
        self._tokens = {each.key: each.tokens for each in wanted}
        self._tiers = {key: store.chain.nearest(key) for key in self._tokens}
        self.near = [each for each in wanted if self._tiers[each.key] in IN_MEMORY]
        self.far = [each for each in wanted if self._tiers[each.key] not in IN_MEMORY]
        tokens = Counter[str]()
        for key, tier in self._tiers.items():
            tokens[tier] += self._tokens[key]
        self._next_s = rates.waits_s(tokens, prefill_tokens_per_s, meanwhile=meanwhile)
        self._patience = dict(self._next_s)  # by tier when it ends, after `_begun`
        self._earned_by_token = 1 / prefill_tokens_per_s if prefill_tokens_per_s and not meanwhile else 0.0
        self._awaited = {key for key, tier in self._tiers.items() if self._patience[tier] > 0}
        self._heard: set[str] = set()  # tiers from which something has come
        self._overdue: set[str] = set()  # tiers that were waited for in vain
        self._done = False
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Patience begins here, also where all threads wait for a source that has stalled."""
        self._look()

    def _look(self) -> None:
        """Go on without the tiers that patience has ended with, and come again when it ends with the next."""
        with self._lock:
            if self._done:
                return
            waited = time.monotonic() - self._begun
            ended = {self._tiers[key] for key in self._awaited if self._patience[self._tiers[key]] <= waited}
            self._awaited = {key for key in self._awaited if self._tiers[key] not in ended}
            vain = ended - self._heard - self._overdue
            self._overdue |= vain
            if over := not self._awaited:
                self._done = True
            else:
                next_s = min(self._patience[self._tiers[key]] for key in self._awaited) - waited
                self._timer = threading.Timer(next_s, self._look)
                self._timer.daemon = True
                self._timer.start()
        for tier in vain:
            self._rates.note_overdue(tier, 1)
        if over:
            self._over()

    def read(self, wanted: Sequence[Wanted], profile: Callable[[str | None], KVProfile], landed: Landed) -> Records:
        """Read these, in this order; blocks for DEADLINE_S at most. `landed`: see `KVStore.get_many`; who has taken what came
        calls `settle`. `profile` of a codec may raise StorageUnavailable, and so does this."""
        begun, found = time.monotonic(), Records({})
        came: dict[str, list[tuple[float, int]]] = defaultdict(list)
        by_codec: dict[str | None, list[str]] = defaultdict(list)
        for each in wanted:
            by_codec[each.codec].append(each.key)

        def noted(key: str, outcome: Found) -> None:
            if isinstance(outcome.outcome, KVRecord):
                came[outcome.tier].append((time.monotonic() - begun, self._tokens[key]))
                self._hear(self._tiers[key], self._tokens[key])
            landed(key, outcome)

        with until(begun + DEADLINE_S):  # a codec's basis is read, too
            for codec, keys in by_codec.items():
                left = begun + DEADLINE_S - time.monotonic()
                records = self._store.get_many(keys, profile(codec), left, noted)
                found |= records
                found.tiers |= records.tiers
        lacking = {self._tiers[key] for key, outcome in found.items() if outcome in (Miss.TIMEOUT, Miss.UNAVAILABLE)}
        for tier in {*came, *lacking} - {*IN_MEMORY}:
            seconds = time.monotonic() - begun if tier in lacking else came[tier][-1][0]
            self._rates.note_load(tier, sum(tokens for _, tokens in came[tier]), seconds)
        return found

    def _hear(self, tier: str, tokens: int = 0) -> None:
        """Something has come from it, or it is given up: either way nobody waits for it in vain any more."""
        with self._lock:
            self._heard.add(tier)
            end = self._patience[tier]
            earned = min(end + tokens * self._earned_by_token, time.monotonic() - self._begun + self._next_s[tier])
            self._patience[tier] = max(end, earned)
            late = tier in self._overdue
            self._overdue.discard(tier)
        if late:
            self._rates.note_overdue(tier, -1)

    def settle(self, keys: Collection[str]) -> None:
        """What has become of these is known, and can be had."""
        with self._lock:
            self._awaited.difference_update(keys)
            if self._awaited or self._done:
                return
            self._done = True
            if self._timer is not None:
                self._timer.cancel()
        self._over()

    def end(self, wanted: Sequence[Wanted]) -> None:
        """Reading these is over, however."""
        for tier in {self._tiers[each.key] for each in wanted}:
            self._hear(tier)
        self.settle([each.key for each in wanted])
