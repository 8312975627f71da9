"""The KV queue's worker: leases owed rows, compiles their chunks in batches, and stores one batch while it
computes
the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import structlog
import torch

from precompute import rows
from precompute.rows import Batch
from precompute.types import AskElsewhere, Compiler, Elsewhere, RecordStore, nowhere
from storage import tracing
from storage.catalogue.engine import Catalogue
from storage.catalogue.lease import Heartbeat
from storage.codecs import CODECS
from storage.codecs.transform import TRANSFORMS
from storage.conditioning import KVKeys, Reading
from storage.errors import Cancelled, Overloaded, Stopping, StorageUnavailable
from storage.types import KVRecord

log = structlog.get_logger()
RETRY_DELAY = 5.0  # seconds until rows are tried again whose store did not answer
CANCEL_SECONDS = 0.25  # how often it is looked whether a batch that is being computed is still wanted


@dataclass
class Throughput:
    """What this worker has compiled, and how long the compiling alone took."""

    chunks: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class _Reading(NamedTuple):
    """How a row's chunk is read and stored, as its key says."""

    reading: Reading
    codec: str | None


@dataclass(frozen=True)
class _Computed:
    batch: Batch
    tensors: dict[str, torch.Tensor]
    seconds: float
    failed: tuple[str, ...]  # by their own fault
    foreign: tuple[str, ...]  # keys of another model than this worker's
    codecs: Mapping[str, str | None]  # by key, what it is stored with; None: the reader's own
    elsewhere: Elsewhere


class KVQueue:
    """Computes what is owed. `settled(job_ids)` is called with the jobs that may have ended; `kv_keys`, if
    given, is
    asked whether a row belongs to this worker's model at all. `elsewhere` is asked first: what another site stores need not
    be computed here, and what it is computing is waited for."""

    def __init__(
        self,
        catalogue: Catalogue,
        store: RecordStore,
        reader: Compiler,
        owner: str,
        *,
        batch_tokens: int = 4096,
        lease_seconds: float = 60.0,
        max_attempts: int = rows.MAX_ATTEMPTS,
        kv_keys: KVKeys,
        settled: Callable[[set[str]], None] = lambda job_ids: None,
        elsewhere: AskElsewhere = nowhere,
    ) -> None:
        self._catalogue = catalogue
        self._store = store
        self._reader = reader
        self._owner = owner
        self._batch_tokens = batch_tokens
        self._lease_seconds = lease_seconds
        self._max_attempts = max_attempts
        self._kv_keys = kv_keys
        self._settled = settled
        self._elsewhere = elsewhere
        self._held: set[str] = set()
        self._computing: Batch | None = None
        self._unwanted = False  # that batch: nobody waits for any of its rows
        self._renewed = 0.0
        self._held_lock = threading.Lock()
        self._last_tenant: str | None = None
        self.throughput = Throughput()

    def drain(self, stop: Callable[[], bool] = lambda: False, seconds: float | None = None) -> int:
        """Work until nothing is due, `stop()` says so, or the time is up; the number of rows that were
        tried."""
        until = None if seconds is None else time.monotonic() + seconds
        tried = 0
        writing: Future[None] | None = None
        with self._heartbeat(), ThreadPoolExecutor(1, thread_name_prefix="kv-write") as writer:
            while not stop() and (until is None or time.monotonic() < until):
                batch = self._claim()
                if batch is None and writing is not None:
                    writing.result()  # it may have given rows back
                    writing = None
                    continue
                if batch is None:
                    break
                tried += len(batch.rows)
                try:
                    computed = self._compute(batch)
                except Cancelled:
                    continue
                except Stopping:
                    break
                if writing is not None:
                    writing.result()  # one batch at most is kept in memory besides the one being computed
                writing = writer.submit(self._finish, computed)
            if writing is not None:
                writing.result()
        return tried

    # --- leases ---

    def _heartbeat(self) -> Heartbeat:
        self._renewed = time.monotonic()
        return Heartbeat(self._beat, min(CANCEL_SECONDS, self._lease_seconds / 3))

    def _beat(self) -> None:
        if (batch := self._computing) is not None:
            with self._catalogue.read() as session:
                unwanted = not rows.is_wanted(session, batch)
            with self._held_lock:
                self._unwanted = unwanted and self._computing is batch
        with self._held_lock:
            held = set(self._held)
        if held and time.monotonic() - self._renewed >= self._lease_seconds / 3:
            with self._catalogue.write() as session:
                rows.renew(session, held, self._lease_seconds)
            self._renewed = time.monotonic()

    def check(self) -> None:
        """To be called while a batch is computed. Raises Cancelled if nobody waits for any of its rows by now."""
        if self._unwanted:
            raise Cancelled("the batch is wanted no more")

    def _claim(self) -> Batch | None:
        with self._catalogue.write() as session:
            batch = rows.claim(
                session, self._owner, self._lease_seconds, self._batch_tokens, self._last_tenant
            )
        if batch is None:
            return None
        self._last_tenant = batch.tenant_id
        with self._held_lock:
            self._held.add(batch.token)
        return batch

    # --- computing ---

    def _compute(self, batch: Batch) -> _Computed:
        """Raises Stopping if this process is to end meanwhile: then the rows are another worker's at once, and nobody is to
        blame. And Cancelled if nobody waits for them any more."""
        try:
            with self._held_lock:
                self._computing, self._unwanted = batch, False
            with self._span("kv.compile", batch):
                return self._computed(batch)
        except (Stopping, Cancelled):
            with self._catalogue.write() as session:
                keys = [row.key for row in batch.rows]
                rows.give_back(session, batch, keys, blame=False, max_attempts=self._max_attempts)
            self._let_go(batch)
            raise
        finally:
            with self._held_lock:
                self._computing, self._unwanted = None, False

    def _span(self, name: str, batch: Batch) -> AbstractContextManager[object]:
        """A part of the trace of the job the batch is for; of several jobs, a trace of its own with links to theirs."""
        if not tracing.on():
            return nullcontext()
        with self._catalogue.read() as session:
            traces = rows.origins(session, batch)
        parent = tracing.incoming(traces[0] if len(traces) == 1 else None)
        counts = {"preread.chunks": len(batch.rows), "preread.tokens": batch.tokens}
        return tracing.span(name, counts, parent=parent, links=tracing.links(traces if len(traces) > 1 else ()))

    def _let_go(self, batch: Batch) -> None:
        with self._held_lock:
            self._held.discard(batch.token)

    def _computed(self, batch: Batch) -> _Computed:
        read = self._readings(batch)
        elsewhere = self._elsewhere([row.key for row in batch.rows if row.key in read])
        spared = elsewhere.stored.keys() | elsewhere.awaited
        mine = [row for row in batch.rows if row.key in read and row.key not in spared]
        foreign = tuple(row.key for row in batch.rows if row.key not in read)
        tensors: dict[str, torch.Tensor] = {}
        started = time.monotonic()
        try:
            if mine:
                results = self._reader.compile_readings([read[row.key].reading for row in mine])
                tensors = {row.key: kv for row, kv in zip(mine, results, strict=True)}
        except (Stopping, Cancelled):
            raise
        except Exception as error:  # noqa: BLE001 - one chunk's fault must not fail the chunks beside it
            log.warning("compile_failed", chunks=len(mine), error=type(error).__name__)
            tensors = self._one_by_one({row.key: read[row.key] for row in mine}) if len(mine) > 1 else {}
        seconds = time.monotonic() - started
        self.throughput.chunks += len(tensors)
        self.throughput.tokens += sum(len(row.token_ids) for row in mine if row.key in tensors)
        self.throughput.seconds += seconds
        failed = tuple(row.key for row in mine if row.key not in tensors)
        codecs = {key: each.codec for key, each in read.items()}
        return _Computed(batch, tensors, seconds, failed, foreign, codecs, elsewhere)

    def _one_by_one(self, read: Mapping[str, _Reading]) -> dict[str, torch.Tensor]:
        tensors = {}
        for key, each in read.items():
            try:
                [tensors[key]] = self._reader.compile_readings([each.reading])
            except (Stopping, Cancelled):
                raise
            except Exception as error:  # noqa: BLE001 - it is tried again, and fails alone
                log.warning("compile_failed", key=key[:12], error=type(error).__name__)
        return tensors

    def _readings(self, batch: Batch) -> dict[str, _Reading]:
        """How each row's chunk is read, as its key says; rows of another model are left out."""
        found: dict[str, _Reading] = {}
        for row in batch.rows:
            possible = [(row.token_ids,), (*row.before, row.token_ids)]
            for codec in (None, *CODECS, *TRANSFORMS):  # what a rule chose stands in the key alone
                keys = self._kv_keys(possible, row.sharing_group, codec)
                if row.key in keys:
                    found[row.key] = _Reading(possible[keys.index(row.key)], codec)
                    break
        return found

    # --- storing ---

    def _finish(self, computed: _Computed) -> None:
        """Store a batch's objects, end its rows, and let go of its lease."""
        batch = computed.batch
        try:
            with self._span("kv.store", batch):
                written, unstored, blamed = self._put(computed)
            with self._catalogue.write() as session:
                rows.mark_done(session, batch, written, computed.seconds)
                rows.mark_stored(session, batch, computed.elsewhere.stored)
                attempts = self._max_attempts
                rows.give_back(session, batch, blamed, blame=True, max_attempts=attempts)
                rows.give_back(
                    session,
                    batch,
                    [*unstored, *computed.elsewhere.awaited],
                    blame=False,
                    delay=RETRY_DELAY,
                    max_attempts=attempts,
                )
                rows.mark_failed(session, batch, computed.foreign)
                jobs = rows.waiting_jobs(session, [row.key for row in batch.rows])
        except (StorageUnavailable, Overloaded) as error:
            log.warning("kv_batch_lost", chunks=len(batch.rows), error=type(error).__name__)
            return  # the lease expires, and the rows are computed again
        finally:
            self._let_go(batch)
        self._settled(jobs)

    def _put(self, computed: _Computed) -> tuple[dict[str, int], list[str], list[str]]:
        """Bytes written by key; keys whose store did not answer; keys that failed by their own fault."""
        written: dict[str, int] = {}
        blamed = list(computed.failed)
        by_key = {row.key: row for row in computed.batch.rows}
        for key, kv in computed.tensors.items():
            profile = self._reader.stored_as(computed.codecs[key])
            record = KVRecord(key, profile, by_key[key].token_ids, kv.cpu())
            try:
                written[key] = self._store.put(record)
            except StorageUnavailable as error:
                log.warning("kv_store_unavailable", error=type(error).__name__)
                break  # the others would wait in vain as well
            except ValueError as error:
                log.warning("kv_refused", key=key[:12], error=str(error))
                blamed.append(key)
        unstored = [key for key in computed.tensors if key not in written and key not in blamed]
        return written, unstored, blamed
