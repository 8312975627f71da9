"""The KV queue's worker: leases owed rows, has their chunks compiled in batches, and one batch stored while the next is
computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import structlog

from precompute import rows
from precompute.rows import Batch
from precompute.types import AskElsewhere, Compiler, Elsewhere, Made, Wanted, nowhere
from storage import tracing
from storage.catalogue.engine import Catalogue
from storage.catalogue.lease import Heartbeat
from storage.codecs import CODECS
from storage.codecs.transform import TRANSFORMS
from storage.conditioning import KVKeys
from storage.errors import Cancelled, EngineUnavailable, Overloaded, Stopping, StorageUnavailable

log = structlog.get_logger()
RETRY_DELAY = 5.0  # seconds until rows are tried again whose store did not answer
CANCEL_SECONDS = 0.25  # how often it is looked whether a batch that is being computed is still wanted


@dataclass
class Throughput:
    """What this worker has had compiled and stored, and how long the compiling alone took."""

    chunks: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class _Computed:
    batch: Batch
    store: Callable[[], Made]
    seconds: float
    foreign: tuple[str, ...]  # keys of another model than this worker's
    elsewhere: Elsewhere


class KVQueue:
    """Has computed what is owed. `settled(job_ids)` is called with the jobs that may have ended; `kv_keys` is asked whether a row
    belongs to this worker's model at all. `elsewhere` is asked first: what another site stores need not be computed here, and
    what it is computing is waited for."""

    def __init__(
        self,
        catalogue: Catalogue,
        compiler: Compiler,
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
        self._compiler = compiler
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
                except EngineUnavailable as error:
                    log.warning("kv_not_compiled", chunks=len(batch.rows), error=str(error))
                    tried -= len(batch.rows)  # no bell: the beat rings when they are due
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
        blame. And Cancelled if nobody waits for them any more; EngineUnavailable, where the rows are tried again later."""
        try:
            with self._held_lock:
                self._computing, self._unwanted = batch, False
            with self._span("kv.compile", batch):
                return self._computed(batch)
        except (Stopping, Cancelled, EngineUnavailable) as error:
            delay = RETRY_DELAY if isinstance(error, EngineUnavailable) else 0.0
            with self._catalogue.write() as session:
                keys = [row.key for row in batch.rows]
                rows.give_back(session, batch, keys, blame=False, delay=delay, max_attempts=self._max_attempts)
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
        elsewhere = self._elsewhere(list(read))
        spared = elsewhere.stored.keys() | elsewhere.awaited
        mine = [each for key, each in read.items() if key not in spared]
        foreign = tuple(row.key for row in batch.rows if row.key not in read)
        started = time.monotonic()
        store = self._compiler.compile(mine) if mine else lambda: Made({})
        return _Computed(batch, store, time.monotonic() - started, foreign, elsewhere)

    def _readings(self, batch: Batch) -> dict[str, Wanted]:
        """By key, how each row's chunk is read, as its key says; rows of another model are left out."""
        found: dict[str, Wanted] = {}
        for row in batch.rows:
            possible = [(row.token_ids,), (*row.before, row.token_ids)]
            for codec in (None, *CODECS, *TRANSFORMS):  # what a rule chose stands in the key alone
                keys = self._kv_keys(possible, row.sharing_group, codec)
                if row.key in keys:
                    found[row.key] = Wanted(row.key, row.sharing_group, possible[keys.index(row.key)], codec)
                    break
        return found

    # --- storing ---

    def _finish(self, computed: _Computed) -> None:
        """Have a batch stored, end its rows, and let go of its lease."""
        batch = computed.batch
        try:
            with self._span("kv.store", batch):
                made = computed.store()
            self._count(computed, made)
            with self._catalogue.write() as session:
                rows.mark_done(session, batch, made.written, computed.seconds)
                rows.mark_stored(session, batch, computed.elsewhere.stored)
                attempts = self._max_attempts
                rows.give_back(session, batch, made.failed, blame=True, max_attempts=attempts)
                later = [*made.unstored, *computed.elsewhere.awaited]
                rows.give_back(session, batch, later, blame=False, delay=RETRY_DELAY, max_attempts=attempts)
                rows.mark_failed(session, batch, computed.foreign)
                jobs = rows.waiting_jobs(session, [row.key for row in batch.rows])
        except (StorageUnavailable, Overloaded) as error:
            log.warning("kv_batch_lost", chunks=len(batch.rows), error=type(error).__name__)
            return  # the lease expires, and the rows are computed again
        finally:
            self._let_go(batch)
        self._settled(jobs)

    def _count(self, computed: _Computed, made: Made) -> None:
        self.throughput.chunks += len(made.written)
        self.throughput.tokens += sum(len(row.token_ids) for row in computed.batch.rows if row.key in made.written)
        self.throughput.seconds += computed.seconds
