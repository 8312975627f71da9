"""Threads that bring a prompt's objects from the storage tiers, while the engine goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from serving.connector.director import Job
from storage.kvstore import KVStore
from storage.types import KVRecord, Miss

log = logging.getLogger(__name__)
THREADS = 4


@dataclass
class Fetched:
    """By key. `missed`: reasons; a record that is not of its span's tokens counts as missed."""

    records: dict[str, KVRecord] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)
    tiers: dict[str, str] = field(default_factory=dict)
    ms: float = 0.0


class Fetches:
    """`explain(key, miss)` is told of what could not be used and answers with the reason to report; it may ask the catalogue.
    After `patience_s` what has not come is missed, and computed."""

    def __init__(self, store: KVStore, explain: Callable[[str, Miss], str], patience_s: float) -> None:
        self._store, self._explain, self._patience_s = store, explain, patience_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-fetch")
        self._here: dict[str, Fetched] = {}
        self._wanted: set[str] = set()
        self._changed = threading.Condition()

    def begin(self, job: Job) -> None:
        with self._changed:
            self._wanted.add(job.request_id)
        self._threads.submit(self._fetch, job)

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
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, job: Job) -> None:
        begun = time.monotonic()
        try:
            found = self._read(job)
        except Exception as error:
            log.exception("fetching KV failed; the chunks are computed")
            found = Fetched(missed={span.key: type(error).__name__ for span in job.plan.spans})
        found.ms = (time.monotonic() - begun) * 1000
        with self._changed:
            if job.request_id in self._wanted:
                self._here[job.request_id] = found
                self._changed.notify_all()

    def _read(self, job: Job) -> Fetched:
        found, end = Fetched(), time.monotonic() + self._patience_s
        spans = [span for span in job.plan.spans if span.end > job.start]
        for profile in dict.fromkeys(job.plan.profile_of(span) for span in spans):
            keys = [span.key for span in spans if job.plan.profile_of(span) == profile]
            records = self._store.get_many(keys, profile, max(0.0, end - time.monotonic()))
            for key, outcome in records.items():
                if isinstance(outcome, KVRecord):
                    found.records[key] = outcome
                    found.tiers[key] = records.tiers.get(key, "")
                else:
                    found.missed[key] = self._reason(key, outcome)
        for span in spans:
            record = found.records.get(span.key)
            if record and record.token_ids[span.skip : span.skip + span.length] != job.token_ids[span.start : span.end]:
                del found.records[span.key]
                found.missed[span.key] = str(Miss.WRONG_KEY)
        return found

    def _reason(self, key: str, miss: Miss) -> str:
        """A catalogue that does not answer costs the reason, not the other chunks."""
        try:
            return self._explain(key, miss)
        except Exception:
            log.exception("a miss could not be reported")
            return str(miss)
