"""The engine in our own process: one thread computes, requests take turns piece by piece, so that none waits for
another's long prefill and a cancelled one ends at its next turn."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor

from precompute.reader import Reader
from serving.blend.assembly import Segment, assemble
from serving.blend.methods import Method, parse_method
from serving.engine.sampling import Sampler
from serving.engine.sessions import BlendSession, PlainSession, Session
from serving.engine.text import TextStream
from serving.engine.types import ChunkNotReused, Delta, GenerateRequest, Outcome, Report
from serving.prompt import PromptPlan, plan_prompt
from storage.errors import Overloaded, PrereadError
from storage.kvstore import KVStore
from storage.types import KVRecord, Miss

log = logging.getLogger(__name__)
FETCH_DEADLINE_S = 5.0
Records = Mapping[str, KVRecord | Miss]
OnMiss = Callable[[str, Miss], str]


class TorchGeneration:
    """See `types.Generation`. Made by the event loop's thread, fed by the engine's."""

    def __init__(self, request: GenerateRequest, plan: PromptPlan, method: Method) -> None:
        self.request, self.plan, self.method = request, plan, method
        self.outcome: Outcome | None = None
        self.report = Report(method=request.method, chunks=len(plan.chunks))
        self.cancelled = threading.Event()
        self.born = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    def emit(self, event: Delta | Exception | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def cancel(self) -> None:
        self.cancelled.set()
        self.emit(PrereadError("the request was cancelled", code="cancelled"))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.born) * 1000


class TorchEngine:
    """`Engine` over one `Reader`. `on_miss(key, miss)` is told of stored KV that could not be used and answers with the
    reason to report."""

    def __init__(self, reader: Reader, kv_store: KVStore, *, max_requests: int = 8, on_miss: OnMiss | None = None) -> None:
        self.reader, self._kv = reader, kv_store
        self.model_id = reader.name
        self.max_model_len = reader.max_positions
        self.full_prefill_reason = reader.full_prefill_reason
        self._on_miss = on_miss or (lambda _key, miss: str(miss))
        self._max_active, self._max_waiting = max_requests, 4 * max_requests
        self._inbox: queue.SimpleQueue[tuple[TorchGeneration, Records] | None] = queue.SimpleQueue()
        self._fetchers = ThreadPoolExecutor(max_requests, thread_name_prefix="kv-fetch")
        self._live: set[TorchGeneration] = set()
        self._live_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> TorchGeneration:
        """See `Engine.submit`. KV is fetched by its own threads; the engine's thread only computes."""
        method = parse_method("full" if self.full_prefill_reason else request.method)
        plan = plan_prompt(self.reader.format, request.messages, request.chunks, self.max_model_len, request.max_tokens)
        generation = TorchGeneration(request, plan, method)
        with self._live_lock:
            if len(self._live) >= self._max_active + self._max_waiting:
                raise Overloaded("too many requests wait already; try again in a few seconds")
            self._live.add(generation)
        self._fetchers.submit(self._fetch, generation)
        return generation

    def check(self) -> None:
        """Raises PrereadError if the computing thread has died."""
        if not self._thread.is_alive():
            raise PrereadError("the engine's thread has ended; restart the process", code="engine_down")

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=30)
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        for generation in list(self._live):
            generation.emit(PrereadError("the engine was closed", code="cancelled"))

    def _fetch(self, generation: TorchGeneration) -> None:
        records: Records = {}
        try:
            keys = [c.kv_key for c in generation.plan.chunks if c.kv_key]
            generation.report.ms["queue"] = generation.elapsed_ms()
            if keys and generation.method.uses_stored:
                records = self._kv.get_many(list(dict.fromkeys(keys)), self.reader.profile, FETCH_DEADLINE_S)
        except Exception:
            log.exception("fetching KV failed; the chunks are computed")
        generation.report.ms["fetch"] = generation.elapsed_ms() - generation.report.ms["queue"]
        self._inbox.put((generation, records))

    def _run(self) -> None:
        active: deque[tuple[TorchGeneration, Generator[None, None, None]]] = deque()
        waiting: deque[tuple[TorchGeneration, Records]] = deque()
        if not self.full_prefill_reason:
            self.reader.frame_kv()  # so that the first request does not pay for it
        while True:
            try:
                item = self._inbox.get(block=not active and not waiting)
                if item is None:
                    return
                waiting.append(item)
                continue
            except queue.Empty:
                pass
            for entry in [entry for entry in waiting if entry[0].cancelled.is_set()]:
                waiting.remove(entry)
                self._release(entry[0])
            while waiting and len(active) < self._max_active:
                generation, records = waiting.popleft()
                active.append((generation, self._answer(generation, records)))
            if not active:
                continue
            generation, work = active.popleft()
            if self._advance(generation, work):
                active.append((generation, work))
            else:
                self._release(generation)

    def _release(self, generation: TorchGeneration) -> None:
        with self._live_lock:
            self._live.discard(generation)

    def _advance(self, generation: TorchGeneration, work: Generator[None, None, None]) -> bool:
        """One turn of a request; True if it has more to do."""
        try:
            if not generation.cancelled.is_set():
                next(work)
                return True
        except StopIteration:
            generation.emit(None)
        except Exception as error:
            if not isinstance(error, PrereadError):
                log.exception("a generation failed")
            generation.emit(error)
        return False

    def _answer(self, generation: TorchGeneration, records: Records) -> Generator[None, None, None]:
        request, report = generation.request, generation.report
        begun = generation.elapsed_ms()
        session = self._session(generation, records)
        logits = yield from session.start()
        report.ms["blend"] = generation.elapsed_ms() - begun
        if isinstance(session, BlendSession):
            account(report, session, self.reader.layers)
        sampler = Sampler(request.temperature, request.top_p, request.seed)
        stream = TextStream(self.reader.tokenizer.decode, request.stop)
        finish, count = "length", 0
        while count < request.max_tokens:
            token = sampler.choose(logits)
            if count == 0:
                report.ms["first_token"] = generation.elapsed_ms()
            count += 1
            if token in self.reader.stop_ids:
                finish = "stop"
                break
            if piece := stream.feed(token):
                generation.emit(Delta(piece))
            if stream.stopped:
                finish = "stop"
                break
            yield
            if count < request.max_tokens:
                logits = session.step(token)
        if rest := stream.finish():
            generation.emit(Delta(rest))
        plan = generation.plan
        generation.outcome = Outcome(stream.text, finish, plan.tokens, count, plan.chunks, report)

    def _session(self, generation: TorchGeneration, records: Records) -> Session:
        plan, report = generation.plan, generation.report
        report.full_prefill_reason = self.full_prefill_reason
        segments = [Segment("frame", plan.frame)] if plan.frame else []
        for label, chunk in zip(plan.labels, plan.chunks, strict=True):
            found = records.get(chunk.kv_key or "")
            kv = found.kv if isinstance(found, KVRecord) and found.token_ids == chunk.token_ids else None
            if kv is None:
                report.not_reused.append(ChunkNotReused(chunk.chunk_id, self._reason(generation, chunk.kv_key, found)))
            else:
                report.bytes_fetched += kv.nbytes
            segments += [Segment("label", label), Segment("chunk", chunk.token_ids, kv)]
        segments.append(Segment("tail", plan.tail))
        if self.full_prefill_reason:
            report.tokens_computed = plan.tokens
            return PlainSession(self.reader, [i for s in segments for i in s.ids])
        if not generation.method.uses_stored or not plan.frame:
            segments = [Segment("tail", tuple(i for s in segments for i in s.ids))]
        return BlendSession(self.reader, assemble(self.reader, segments, generation.request.max_tokens), generation.method)

    def _reason(self, generation: TorchGeneration, key: str | None, found: KVRecord | Miss | None) -> str:
        if self.full_prefill_reason:
            return "model"
        if not generation.method.uses_stored:
            return "method"
        if key is None:
            return "pending"
        return self._on_miss(key, found if isinstance(found, Miss) else Miss.WRONG_KEY)


def account(report: Report, session: BlendSession, layers: int) -> None:
    """Fill in the token counts; a token recomputed in some layers only counts by its share."""
    assembly = session.assembly
    stored = sum(b - a for a, b in assembly.spans)
    recomputed = round(assembly.recomputed_token_layers / layers)
    report.tokens_recomputed = min(recomputed, stored)
    report.tokens_reused = assembly.tokens - len(assembly.fresh) - report.tokens_recomputed
    report.tokens_computed = len(assembly.fresh)
    report.recomputed_fraction = assembly.recomputed_token_layers / (stored * layers) if stored else 0.0
