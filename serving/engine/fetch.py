"""Stored KV for requests, fetched by threads of their own (`loading.py`). What comes after the engine has a request is still used
where computing has not got to (`serving.blend.late`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from precompute.reader import Reader
from serving.engine.loading import Loading, Readers, Wanted
from serving.engine.rates import Rates
from storage.kvstore import KVStore
from storage.tiers.flights import Found
from storage.types import Miss

if TYPE_CHECKING:
    from serving.engine.torch_engine import TorchGeneration

log = logging.getLogger(__name__)
OnMiss = Callable[[str, Miss], str]


class Fetcher:
    """`ready(generation)` is called once for each that is submitted. `on_miss`: see `TorchEngine`."""

    def __init__(
        self, reader: Reader, kv_store: KVStore, on_miss: OnMiss, ready: Callable[[TorchGeneration], None],
        *, threads: int, rates: Rates,
    ) -> None:  # fmt: skip
        self._reader, self._kv, self._on_miss, self._ready = reader, kv_store, on_miss, ready
        self._rates = rates
        self._readers = Readers(threads)
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="kv-reasons")

    def submit(self, generation: TorchGeneration) -> None:
        """Patience begins here."""
        # From the prompt's end on, since computing begins at its start.
        chunks = [p.chunk for p in reversed(generation.passages) if generation.arrivals.awaits(p.chunk.kv_key)]
        wanted = [Wanted(chunk.kv_key or "", len(chunk.token_ids), chunk.codec) for chunk in chunks]
        speed = self._reader.prefill_tokens_per_s
        loading = Loading(self._kv, self._rates, wanted, speed, lambda: self._hand_over(generation), meanwhile=True)
        self._readers.begin(loading, partial(self._fetch, generation, loading))

    def close(self) -> None:
        self._readers.close()
        self._asking.shutdown(wait=False, cancel_futures=True)

    def _hand_over(self, generation: TorchGeneration) -> None:
        ms = generation.report.ms
        ms["fetch"] = generation.elapsed_ms() - ms.setdefault("queue", 0.0)
        self._ready(generation)

    def _fetch(self, generation: TorchGeneration, loading: Loading, part: Sequence[Wanted]) -> None:
        generation.report.ms.setdefault("queue", generation.elapsed_ms())
        try:
            if generation.outcome is None and not generation.cancelled.is_set():  # else nobody needs it any more
                self._read(generation, loading, part)
        except Exception:
            log.exception("fetching KV failed; the chunks are computed")
        finally:
            generation.arrivals.end([each.key for each in part])
            loading.end(part)

    def _read(self, generation: TorchGeneration, loading: Loading, part: Sequence[Wanted]) -> None:
        explained: dict[str, Future[None]] = {}

        def landed(key: str, found: Found) -> None:
            if isinstance(found.outcome, Miss):  # asking why may take long, and who tells us must not wait
                with contextlib.suppress(RuntimeError):  # of an engine that was closed: then it is told below
                    explained[key] = self._asking.submit(self._explain, generation, loading, key, found.outcome)
            else:
                self._land(generation, loading, key, found)

        records = loading.read(part, self._reader.stored_as, landed)
        for key, outcome in records.items():
            if isinstance(outcome, Miss) and key not in explained:
                self._explain(generation, loading, key, outcome)
        for each in explained.values():
            each.result()

    def _explain(self, generation: TorchGeneration, loading: Loading, key: str, miss: Miss) -> None:
        """The reason first: whoever takes the miss reports it."""
        generation.reasons[key] = self._on_miss(key, miss)
        self._land(generation, loading, key, Found(miss))

    def _land(self, generation: TorchGeneration, loading: Loading, key: str, found: Found) -> None:
        generation.arrivals.land(key, found)
        loading.settle([key])
