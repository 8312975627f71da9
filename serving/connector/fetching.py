"""Threads that bring a prompt's objects from the storage tiers, while the engine goes on. Which are waited for, and how long, is
what the torch engine goes by, too (`serving.engine.rates`); what comes later is in memory for the next prompt."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from serving.connector.director import Job
from serving.connector.plan import Span
from serving.engine.loading import SLOW, Loading, Readers, Wanted
from serving.engine.rates import Rates
from storage.kvstore import KVStore
from storage.tiers.flights import Found
from storage.types import KVProfile, KVRecord, Miss

log = logging.getLogger(__name__)
THREADS = 32  # each is held by a source that stalls until a fetch is given up, long after its prompt went on


@dataclass
class Fetched:
    """By key. `missed`: reasons; a record that is not of its span's tokens counts as missed."""

    records: dict[str, KVRecord] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)
    tiers: dict[str, str] = field(default_factory=dict)
    ms: float = 0.0


@dataclass
class _Fetch:
    """One prompt's. `found` grows while its objects are read."""

    job: Job
    spans: dict[str, list[Span]]  # by key, those beyond what is there already
    found: Fetched = field(default_factory=Fetched)
    begun: float = field(default_factory=time.monotonic)

    def profile(self, codec: str | None) -> KVProfile:
        plan = self.job.plan
        return plan.profile if codec is None else replace(plan.profile, codec=codec)

    def note(self, key: str, found: Found) -> None:
        outcome, ids = found.outcome, self.job.token_ids
        if isinstance(outcome, Miss):
            self.found.missed[key] = str(outcome)
        elif all(outcome.token_ids[s.skip : s.skip + s.length] == ids[s.start : s.end] for s in self.spans[key]):
            self.found.records[key], self.found.tiers[key] = outcome, found.tier
        else:
            self.found.missed[key] = str(Miss.WRONG_KEY)

    def told(self) -> Fetched:
        """What there is by now."""
        slow = {key: SLOW for key in self.spans if key not in self.found.records}
        ms = (time.monotonic() - self.begun) * 1000
        return Fetched(dict(self.found.records), slow | self.found.missed, dict(self.found.tiers), ms)


class Fetches:
    """`explain(key, miss)` is told of what could not be used and answers with the reason to report; it may ask the catalogue.
    `speed()`: tokens per second of the model's prefill, as far as it is known."""

    def __init__(
        self, store: KVStore, explain: Callable[[str, Miss], str], rates: Rates, speed: Callable[[], float | None]
    ) -> None:
        self._store, self._explain, self._rates, self._speed = store, explain, rates, speed
        self._readers = Readers(THREADS)
        self._here: dict[str, Fetched] = {}
        self._wanted: set[str] = set()
        self._changed = threading.Condition()

    def begin(self, job: Job) -> None:
        with self._changed:
            self._wanted.add(job.request_id)
        spans: dict[str, list[Span]] = {}
        for span in job.plan.spans:
            if span.end > job.start:
                spans.setdefault(span.key, []).append(span)
        fetch = _Fetch(job, spans)
        wanted = [Wanted(key, each[0].length, each[0].codec or None) for key, each in spans.items()]
        loading = Loading(self._store, self._rates, wanted, self._speed(), lambda: self._hand_over(fetch), meanwhile=False)
        self._readers.begin(loading, partial(self._fetch, fetch, loading))

    def give_up(self, request_id: str) -> None:
        with self._changed:
            self._wanted.discard(request_id)
            self._here.pop(request_id, None)

    def landed(self, wait_s: float) -> dict[str, Fetched]:
        """What has come since this was last asked; waits for the first so long, if anything is on its way."""
        with self._changed:
            if self._wanted and not self._here:
                self._changed.wait(wait_s)
            found, self._here = self._here, {}
            self._wanted -= found.keys()
            return found

    def close(self) -> None:
        self._readers.close()

    def _hand_over(self, fetch: _Fetch) -> None:
        with self._changed:
            if fetch.job.request_id in self._wanted:
                self._here[fetch.job.request_id] = fetch.told()
                self._changed.notify_all()

    def _fetch(self, fetch: _Fetch, loading: Loading, part: Sequence[Wanted]) -> None:
        keys = [each.key for each in part]
        try:
            if fetch.job.request_id in self._wanted:  # else it is given up, or went on without them
                self._read(fetch, loading, part)
        except Exception as error:
            log.exception("fetching KV failed; the chunks are computed")
            with self._changed:
                failed = {key: type(error).__name__ for key in keys if key not in fetch.found.records}
                fetch.found.missed = failed | fetch.found.missed
        finally:
            loading.end(part)

    def _read(self, fetch: _Fetch, loading: Loading, part: Sequence[Wanted]) -> None:
        def landed(key: str, found: Found) -> None:
            with self._changed:
                fetch.note(key, found)
            if isinstance(found.outcome, KVRecord):
                loading.settle([key])

        for key, outcome in loading.read(part, fetch.profile, landed).items():
            if isinstance(outcome, Miss):
                reason = self._reason(key, outcome)
                with self._changed:
                    fetch.found.missed[key] = reason
                loading.settle([key])

    def _reason(self, key: str, miss: Miss) -> str:
        """A catalogue that does not answer costs the reason, not the other chunks."""
        try:
            return self._explain(key, miss)
        except Exception:
            log.exception("a miss could not be reported")
            return str(miss)
