"""The engine in our own process: threads fetch stored KV, one thread computes. Requests have their turns piece by piece, in an
order that `turns` decides; a cancelled one ends before the next piece."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from precompute.reader import PIECE, Reader
from serving.blend.methods import Method, parse_method
from serving.engine import spans
from serving.engine.admission import Admission
from serving.engine.arrivals import Arrivals
from serving.engine.blended import Blended, BlendedCache
from serving.engine.canary import Canary
from serving.engine.conversations import Conversations, Recalled, Seen
from serving.engine.fetch import Fetcher, OnMiss
from serving.engine.generation import Emitted
from serving.engine.opening import Opening
from serving.engine.planner import Planner
from serving.engine.rates import Rates
from serving.engine.sessions import BlendSession
from serving.engine.turns import Running, Turns
from serving.engine.types import GenerateRequest, Outcome, Report
from serving.engine.writer import Writer
from serving.passages import find_passages
from serving.prompt import Passage, PromptPlan
from storage.errors import PrereadError, Stopping
from storage.kvstore import KVStore
from storage.types import RetrievedChunk

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A prompt, and what is at hand of it: for one request, or for all choices of one."""

    plan: PromptPlan
    method: Method
    passages: tuple[Passage, ...]  # that are to be blended
    recalled: Recalled
    blended: Blended | None
    forgotten: int  # see BlendedCache
    ms: float


class TorchGeneration(Emitted):
    """An answer that `TorchEngine` makes."""

    def __init__(self, request: GenerateRequest, prepared: Prepared) -> None:
        super().__init__(prepared.plan, Report(method=request.method, chunks=len(prepared.plan.chunks)))
        self.request, self.method = request, prepared.method
        self.report.ms["plan"] = prepared.ms
        self.passages, self.recalled = prepared.passages, prepared.recalled
        self.blended, self.forgotten = prepared.blended, prepared.forgotten
        wanted = self.passages if self.blended is None and self.method.uses_stored else ()
        self.arrivals = Arrivals([key for passage in wanted if (key := passage.chunk.kv_key)])
        self.reasons: dict[str, str] = {}  # by KV key, why it could not be used


class TorchEngine:
    """`Engine` over one `Reader`. `on_miss(key, miss)` is told, by a thread that fetches, of stored KV that could not be
    used, and answers with the reason to report. `blended_bytes`: room for prompts that may be taken up again.
    `canary_share`: of the answers that are compared with full prefill afterwards. `patience_s`: how long to wait for stored KV
    whatever is known of its source; None: see `Rates`."""

    def __init__(
        self,
        reader: Reader,
        kv_store: KVStore,
        *,
        max_requests: int = 8,
        on_miss: OnMiss | None = None,
        blended_bytes: int = 0,
        canary_share: float = 0.0,
        patience_s: float | None = None,
    ) -> None:
        self.reader = reader
        self.model_id = reader.name
        self.max_model_len = reader.max_positions
        self.full_prefill_reason = reader.full_prefill_reason
        self._opening = Opening(reader)
        self._planner = Planner(reader)
        self._guide = self._planner.guide
        self._blended = BlendedCache(blended_bytes)
        self._conversations = Conversations(self._blended)
        self._canary = Canary(reader, canary_share)
        self._admission = Admission(max_requests, 4 * max_requests)
        self._inbox: queue.SimpleQueue[TorchGeneration | None] = queue.SimpleQueue()
        self._fetcher = Fetcher(
            reader, kv_store, on_miss or (lambda _key, miss: str(miss)), self._inbox.put,
            threads=5 * max_requests, rates=Rates(patience_s),
        )  # fmt: skip
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def prepare(self, request: GenerateRequest) -> Prepared:
        """See `Engine.prepare`."""
        self._planner.check(request)
        return self._prepared(request)

    def submit(self, request: GenerateRequest, prepared: Prepared | None = None) -> TorchGeneration:
        """See `Engine.submit`. KV is fetched by its own threads; the engine's thread only computes."""
        if self._draining:
            raise Stopping
        generation = TorchGeneration(request, prepared or self._prepared(request))
        self._admission.enter(generation)
        self._fetcher.submit(generation)
        return generation

    def _prepared(self, request: GenerateRequest) -> Prepared:
        method = parse_method("full" if self.full_prefill_reason else request.method)
        begun, forgotten = time.perf_counter(), self._blended.forgotten
        blended = self._blended_before(request)
        plan = self._plan(request, _ordered(request.chunks, blended.order) if blended else request.chunks)
        if blended is not None and len(plan.chunks) < len(blended.order):
            blended, plan = None, self._plan(request, request.chunks)
        recalled, passages = Recalled(), plan.passages
        if not plan.frame and method.uses_stored:
            recalled, passages = self._look_into(request, plan)
        ms = (time.perf_counter() - begun) * 1000
        return Prepared(plan, method, passages, recalled, blended, forgotten, ms)

    def _plan(self, request: GenerateRequest, chunks: Sequence[RetrievedChunk]) -> PromptPlan:
        return self._planner.plan(request, chunks, self.max_model_len)

    def _look_into(self, request: GenerateRequest, plan: PromptPlan) -> tuple[Recalled, tuple[Passage, ...]]:
        """What is at hand of a plain prompt's turns, and the stored chunks in the rest of its text."""
        recalled = self._conversations.recall(request.scope, plan) if _keeps_turns(request) else Recalled()
        return recalled, recalled.without(find_passages(plan, request.known, self.reader.tokenizer.decode))

    def _blended_before(self, request: GenerateRequest) -> Blended | None:
        """What an earlier turn blended. A first question has the tokens computed again that it looks at itself."""
        goes_on = any(message.role == "assistant" for message in request.messages)
        key = _blended_key(request.method, request.chunks) if goes_on else None
        found = self._blended.get(key) if key else None
        return found if isinstance(found, Blended) else None

    def check_room(self) -> None:
        """See `Engine.check_room`."""
        self._admission.check()

    def check(self) -> None:
        """Raises PrereadError if the computing thread has died."""
        if not self._thread.is_alive():
            raise PrereadError("the engine's thread has ended; restart the process", code="engine_down")

    def canary_totals(self) -> tuple[int, float]:
        """See `Engine.canary_totals`."""
        return self._canary.totals()

    def keys_in_memory(self) -> set[str]:
        """The KV keys of chunks in prompts that may be taken up again."""
        return self._blended.keys()

    def forget(self, keys: Iterable[str]) -> None:
        """Drop prompts with these chunks: they were deleted."""
        self._blended.forget(keys)

    def drain(self) -> None:
        """See `Engine.drain`."""
        self._draining = True

    def abandon(self) -> None:
        """See `Engine.abandon`."""
        self._admission.end_all(Stopping())

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=30)
        self._fetcher.close()
        for generation in self._admission.live():
            generation.emit(PrereadError("the engine was closed", code="cancelled"))

    def _run(self) -> None:
        turns = Turns()
        waiting: deque[TorchGeneration] = deque()
        idle_work: Generator[None, None, None] | None = None
        if not self.full_prefill_reason:
            self.reader.frame_kv()  # so that the first request does not pay for it
            self.reader.label_kv()
        while True:
            busy = bool(len(turns) or waiting)
            try:
                item = self._inbox.get(block=not (busy or idle_work or self._canary))
                if item is None:
                    return
                waiting.append(item)
                continue
            except queue.Empty:
                pass
            if not busy:
                idle_work = self._idle_turn(idle_work or self._canary.compare())
                continue
            for generation in waiting if self._draining else ():
                generation.end(Stopping())
            for generation in [generation for generation in waiting if generation.cancelled.is_set()]:
                waiting.remove(generation)
                self._release(generation)
            for running in [running for running in turns if running.generation.cancelled.is_set()]:
                turns.remove(running)
                self._release(running.generation)
            while waiting and len(turns) < self._admission.active:
                generation = waiting.popleft()
                rows, tokens = _rows(generation), generation.plan.tokens
                turns.add(Running(generation, self._answer(generation), rows, min(PIECE, tokens)))
            for running in turns.round():
                if not self._advance(running.generation, running.work):
                    turns.remove(running)
                    self._release(running.generation)

    def _idle_turn(self, work: Generator[None, None, None]) -> Generator[None, None, None] | None:
        """One piece of the canary's work, while nobody waits; what is left of it."""
        try:
            next(work)
        except StopIteration:
            return None
        except Exception:
            log.exception("the canary's comparison failed")
            return None
        return work

    def _release(self, generation: TorchGeneration) -> None:
        spans.record(generation)
        self._admission.leave(generation)

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

    def _answer(self, generation: TorchGeneration) -> Generator[None, None, None]:
        request, report, plan = generation.request, generation.report, generation.plan
        generation.written = 0
        begun = generation.elapsed_ms()
        session = self._opening.session(generation)
        generation.blended = None  # its buffer is copied
        seen = Seen(generation.recalled, generation.passages)
        report.ms["assemble"] = generation.elapsed_ms() - begun
        logits = yield from session.start()
        report.ms["blend"] = generation.elapsed_ms() - begun
        sample = None
        if isinstance(session, BlendSession):
            self._opening.settle(generation, session)
            if report.tokens_reused and not report.tokens_emphasised:
                sample = self._canary.sample(session.assembly.ids)
        writer, fed = Writer(self.reader, self._guide, request), []
        while True:
            token = writer.choose(logits)
            if sample is not None:
                sample.note(logits, token)
            if writer.count == 0:
                report.ms["first_token"] = generation.elapsed_ms()
            delta = writer.write(token)
            generation.written = writer.count
            if delta:
                generation.emit(delta)
            if writer.count == 1 and isinstance(session, BlendSession):
                self._keep(generation, session, seen)  # after the first token, which has been waited for
            if writer.finish_reason is not None:
                break
            yield
            logits = session.step(token)
            fed.append(token)
        if sample is not None:
            self._canary.finish(sample)
        if isinstance(session, BlendSession) and not plan.frame and _keeps_turns(request):
            kv = session.assembly.kv
            self._conversations.keep_answer(request.scope, plan, fed, kv, seen, generation.forgotten)
        generation.outcome = Outcome(writer.text, writer.finish_reason, plan.tokens, writer.count, plan.chunks, report)

    def _keep(self, generation: TorchGeneration, session: BlendSession, seen: Seen) -> None:
        """Keep what was blended, or the turns of a plain prompt, for the conversation's next turn."""
        plan, request, assembly = generation.plan, generation.request, session.assembly
        if not plan.frame:
            if _keeps_turns(request):
                self._conversations.keep(request.scope, plan, assembly.kv, seen, generation.forgotten)
            return
        key = _blended_key(request.method, plan.chunks)
        if key is not None and not generation.report.resumed:
            before = assembly.kv[:, :, :, : assembly.tail_start]
            order = tuple((chunk.kv_key or "", chunk.header) for chunk in plan.chunks)
            self._blended.put(key, Blended(before, frozenset(k for k, _ in order), order=order), generation.forgotten)


def _keeps_turns(request: GenerateRequest) -> bool:
    """Not for methods that are asked for to compare them."""
    return request.method == "default" and bool(request.scope)


def _blended_key(method: str, chunks: Sequence[RetrievedChunk]) -> tuple[tuple[str, str], ...] | None:
    """None for what is not kept: prompts with a chunk that has no key, and methods that are asked for to compare them."""
    keys = [(chunk.kv_key, chunk.header) for chunk in chunks if chunk.kv_key]
    if not keys or len(keys) < len(chunks) or method != "default":
        return None
    return tuple(sorted(keys))


def _ordered(chunks: Sequence[RetrievedChunk], order: Sequence[tuple[str, str]]) -> tuple[RetrievedChunk, ...]:
    """The chunks in the order of these KV keys and headers, which are theirs."""
    by_key: dict[tuple[str, str], list[RetrievedChunk]] = {}
    for chunk in chunks:
        by_key.setdefault((chunk.kv_key or "", chunk.header), []).append(chunk)
    return tuple(by_key[key].pop(0) for key in order)


def _rows(generation: TorchGeneration) -> int:
    """About how many prompt tokens have to be computed."""
    plan = generation.plan
    if generation.blended is not None:
        return len(plan.tail)
    stored = sum(p.end - p.start for p in generation.passages if p.chunk.kv_key in generation.arrivals.stored)
    return plan.tokens - stored - generation.recalled.prefix_tokens - generation.recalled.moved_tokens
