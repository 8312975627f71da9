"""Stored KV for requests, fetched by threads of their own. The engine has a request as soon as all has come, or when its
patience with the source is at an end: what comes later is still used where computing has not got to (`serving.blend.late`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from precompute.reader import Reader
from serving.engine.rates import Rates
from storage.kvstore import KVStore
from storage.tiers.flights import Found
from storage.types import KVRecord, Miss, RetrievedChunk

if TYPE_CHECKING:
    from serving.engine.torch_engine import TorchGeneration

log = logging.getLogger(__name__)
DEADLINE_S = 5.0  # then a fetch is given up
IN_MEMORY = ("device", "memory")
OnMiss = Callable[[str, Miss], str]


class Fetcher:
    """`ready(generation)` is called once for each that is submitted, by a thread of the fetcher. `on_miss`: see `TorchEngine`."""

    def __init__(
        self, reader: Reader, kv_store: KVStore, on_miss: OnMiss, ready: Callable[[TorchGeneration], None],
        *, threads: int, rates: Rates,
    ) -> None:  # fmt: skip
        self._reader, self._kv, self._on_miss, self._ready = reader, kv_store, on_miss, ready
        self._rates = rates
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kv-fetch")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="kv-reasons")

    def submit(self, generation: TorchGeneration) -> None:
        """Patience begins here, also where all threads wait for a source that has stalled."""
        handing = _Handing(generation, self._ready)
        chunks = [p.chunk for p in generation.passages if generation.arrivals.awaits(p.chunk.kv_key)]
        if not chunks:
            handing.over()
            return
        patience = self._rates.patience_s(sum(len(c.token_ids) for c in chunks), self._reader.prefill_tokens_per_s)
        timer = threading.Timer(patience, handing.over)
        timer.daemon = True
        timer.start()
        self._threads.submit(self._fetch, generation, chunks, handing, timer)

    def close(self) -> None:
        for threads in (self._threads, self._asking):
            threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(
        self, generation: TorchGeneration, chunks: Sequence[RetrievedChunk], handing: _Handing, timer: threading.Timer
    ) -> None:
        generation.report.ms["queue"] = generation.elapsed_ms()
        try:
            if not generation.cancelled.is_set():
                self._read(generation, chunks)
        except Exception:
            log.exception("fetching KV failed; the chunks are computed")
        finally:
            timer.cancel()
            generation.arrivals.end({})
            handing.over()

    def _read(self, generation: TorchGeneration, chunks: Sequence[RetrievedChunk]) -> None:
        """All of them, from the prompt's end on, since computing would begin at its start."""
        arrivals, begun = generation.arrivals, time.monotonic()
        keys = {chunk.kv_key: chunk.codec for chunk in reversed(chunks) if chunk.kv_key}
        records: dict[str, KVRecord | Miss] = {}
        explained: dict[str, Future[None]] = {}

        def landed(key: str, found: Found) -> None:
            if isinstance(found.outcome, Miss):  # asking why may take long, and who tells us must not wait
                explained[key] = self._asking.submit(self._explain, generation, key, found.outcome)
            else:
                arrivals.land(key, found)

        for codec in dict.fromkeys(keys.values()):  # a rule may have chosen another for some
            some = [key for key, own in keys.items() if own == codec]
            left = begun + DEADLINE_S - time.monotonic()
            records |= self._kv.get_many(some, self._reader.stored_as(codec), left, landed)
        self._note_rate([c for c in chunks if arrivals.tiers.get(c.kv_key or "") not in IN_MEMORY], records, begun)
        for key, outcome in records.items():
            if isinstance(outcome, Miss) and key not in explained:
                self._explain(generation, key, outcome)
        for each in explained.values():
            each.result()
        arrivals.end(records)

    def _explain(self, generation: TorchGeneration, key: str, miss: Miss) -> None:
        """The reason first: whoever takes the miss reports it."""
        generation.reasons[key] = self._on_miss(key, miss)
        generation.arrivals.land(key, Found(miss))

    def _note_rate(
        self, chunks: Sequence[RetrievedChunk], records: Mapping[str, KVRecord | Miss], begun: float
    ) -> None:
        """What of these came in the time since `begun`. What is not stored at all says nothing about the source."""
        found = {c.kv_key: records.get(c.kv_key or "") for c in chunks}
        loaded = sum(len(c.token_ids) for c in chunks if isinstance(found[c.kv_key], KVRecord))
        if loaded or any(each in (Miss.TIMEOUT, Miss.UNAVAILABLE) for each in found.values()):
            self._rates.note_load(loaded, time.monotonic() - begun)


class _Handing:
    """Hands a request over once, whoever is first: the timer or the fetch."""

    def __init__(self, generation: TorchGeneration, ready: Callable[[TorchGeneration], None]) -> None:
        self._generation, self._ready = generation, ready
        self._done, self._lock = False, threading.Lock()

    def over(self) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
        report = self._generation.report
        report.ms["fetch"] = self._generation.elapsed_ms() - report.ms.setdefault("queue", 0.0)
        self._ready(self._generation)
