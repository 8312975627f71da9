"""The engine in a vLLM process beside ours, whose connector blends (`serving/connector`): prompts go out as token ids with a
signed plan of their stored KV, and token ids come back. A thread of our own has the connections and makes text of tokens, so
that stop sequences, pieces and usage are those of the torch engine."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from precompute.spec import ReaderSpec
from serving.blend.methods import Method, parse_method
from serving.connector.asked import ask, read
from serving.connector.plan import Plan, Told, cache_salt, plan_secret, sign
from serving.engine import spans
from serving.engine.admission import Admission
from serving.engine.generation import Emitted
from serving.engine.orders import Orders
from serving.engine.planner import Planner
from serving.engine.types import ChunkNotReused, ChunkReused, GenerateRequest, Outcome, Report
from serving.engine.vllm_client import PROBE_S, SILENCE_S, Served, VLLMClient
from serving.engine.vllm_labels import Label, Labels
from serving.engine.vllm_request import body, full_salt, kv_plan, prompt_ids, refuse, thread_of
from serving.engine.writer import TokenWriter
from serving.passages import find_passages
from serving.prompt import Passage, PromptPlan
from storage.errors import EngineUnavailable, PrereadError, Stopping

log = logging.getLogger(__name__)
ASKED_S = 1.0  # for what became of a plan; without it an answer is as good, and its report says less
FRESH_S = 5.0  # so long after a sign of life nobody asks for another one
Owners = Callable[[Sequence[str]], frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class Prepared:
    """A prompt: for one request, or for all choices of one. `stored`: where its KV goes, if any is stored."""

    plan: PromptPlan
    ids: Sequence[int]
    passages: tuple[Passage, ...]
    stored: Plan | None
    salt: str
    ms: float


class VLLMGeneration(Emitted):
    """An answer that vLLM makes. `work`: the reading of it, in the engine's thread."""

    def __init__(self, request: GenerateRequest, prepared: Prepared) -> None:
        super().__init__(prepared.plan, Report(method=request.method, chunks=len(prepared.plan.chunks)))
        self.request, self.prepared = request, prepared
        self.report.ms["plan"] = prepared.ms
        self.work: Future[None] | None = None

    def end(self, error: PrereadError) -> None:
        """Read no more of it, upon which vLLM computes no more of it."""
        super().end(error)
        if self.work is not None:
            self.work.cancel()


class VLLMEngine:
    """`Engine` over the vLLM at `url`, which serves the model in `reader`'s folder. `secret`: the installation's; `owners`:
    tenant and sharing group of KV keys; `token`: vLLM's API key; `labels`: of whom plans name those with stored KV. What is
    stored no longer, the connector has repaired."""

    def __init__(
        self, reader: ReaderSpec, url: str, *, secret: bytes, owners: Owners, max_requests: int = 8, token: str = "",
        silence_s: float = SILENCE_S, labels: Labels | None = None,
    ) -> None:  # fmt: skip
        self.reader = reader
        self._labels = labels
        self._label = False  # whether plans name any
        self._labelling: asyncio.Task[None] | None = None
        self.model_id = reader.name
        self.full_prefill_reason = reader.full_prefill_reason
        self._secret, self._owners = secret, owners
        self._planner = Planner(reader)
        self._orders = Orders()
        self._admission = Admission(max_requests, 4 * max_requests)
        self._served: Served | None = None
        self._seen = 0.0  # when vLLM last gave a sign of life
        self._draining = False
        self._loop = asyncio.new_event_loop()
        # Those that wait for their first token hold a connection too: vLLM has the queue. Two more for probes.
        self._client = VLLMClient(url, 5 * max_requests + 2, token, silence_s=silence_s)
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    @property
    def max_model_len(self) -> int:
        """The model's, or what vLLM was told to serve of it."""
        served = self._served.max_model_len if self._served else None
        return min(served or self.reader.max_positions, self.reader.max_positions)

    # --- requests ---

    def prepare(self, request: GenerateRequest) -> Prepared:
        """See `Engine.prepare`. Raises EngineUnavailable too, before an answer has begun."""
        refuse(request)
        self._planner.check(request)
        self._reach()
        begun = time.perf_counter()
        method = parse_method("full" if self.full_prefill_reason else request.method)
        plan = self._planner.plan(request, request.chunks, self.max_model_len)
        passages = plan.passages
        if not plan.frame and method.uses_stored:
            passages = find_passages(plan, request.known, self.reader.tokenizer.decode)
        stored = self._stored(request, plan, passages, method) if method.uses_stored else None
        salt = cache_salt(stored) if stored else full_salt(self._secret, request, plan)
        return Prepared(plan, prompt_ids(plan), passages, stored, salt, (time.perf_counter() - begun) * 1000)

    def _stored(
        self, request: GenerateRequest, plan: PromptPlan, passages: Sequence[Passage], method: Method
    ) -> Plan | None:
        keys = [key for each in passages if (key := each.chunk.kv_key)]
        if not keys:
            return None
        # Passages are the same whatever is asked of them, where the question chooses nothing.
        thread = thread_of(request) if not plan.frame or method.by_question(plan.tokens) else ""
        order = full_salt(self._secret, request, plan) + "".join(keys)
        if plan.frame and thread and self._orders.comes_again(order, thread):
            return None
        labels = self._known_labels() if method.stored_labels else ()
        owners = self._owners(sorted({*keys}))
        return kv_plan(self.reader, request, plan, passages, owners, time.time(), thread, labels)

    def _known_labels(self) -> tuple[Label, ...]:
        """Those with stored KV. They are made when a plan would first name one: to read them is a long prompt."""
        if self._labels is None:
            return ()
        if not self._label:
            self._label = True
            self._loop.call_soon_threadsafe(self._make_labels)
        return self._labels.known

    def submit(self, request: GenerateRequest, prepared: Prepared | None = None) -> VLLMGeneration:
        """See `Engine.submit`."""
        if self._draining:
            raise Stopping
        generation = VLLMGeneration(request, prepared or self.prepare(request))
        self._admission.enter(generation)
        generation.work = self._run(self._answer(generation))
        return generation

    def check_room(self) -> None:
        """See `Engine.check_room`."""
        self._admission.check()

    # --- state ---

    def check(self) -> None:
        """Raises PrereadError where vLLM is not well."""
        if not self._thread.is_alive():
            raise PrereadError("the engine's thread has ended; restart the process", code="engine_down")
        self._wait(self._client.well())

    def canary_totals(self) -> tuple[int, float]:
        """Nothing is compared here: a vLLM that does so would have to compute in full beside its requests."""
        return 0, 0.0

    def keys_in_memory(self) -> set[str]:
        """None: KV is in vLLM's process."""
        return set()

    def forget(self, keys: Iterable[str]) -> None:
        """No plan names a deleted chunk again, and what vLLM has of it is found by such a plan only."""

    def drain(self) -> None:
        """See `Engine.drain`."""
        self._draining = True

    def abandon(self) -> None:
        """See `Engine.abandon`."""
        self._admission.end_all(Stopping())

    def close(self) -> None:
        self._admission.end_all(PrereadError("the engine was closed", code="cancelled"))
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    async def _end(self) -> None:
        if self._labelling is not None:
            self._labelling.cancel()
        await self._client.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it in the engine's thread. Raises EngineUnavailable where that takes too long."""
        doing = self._run(work)
        try:
            doing.result(PROBE_S + 1)
        except TimeoutError:
            doing.cancel()
            raise EngineUnavailable("vLLM did not answer in time; try again in a few seconds") from None

    def _reach(self) -> None:
        """Make sure that vLLM is there, and that we know what it serves. Raises EngineUnavailable."""
        if self._served is None or time.monotonic() - self._seen > FRESH_S:
            self._wait(self._learn())

    async def _learn(self) -> None:
        self._served = None
        self._served = await self._client.served()
        self._seen = time.monotonic()
        if self._label:
            self._make_labels()

    def _make_labels(self) -> None:
        """Beside the answers, what is not stored, or not any longer. In the engine's thread."""
        if self._labels and self._served and (self._labelling is None or self._labelling.done()):
            self._labelling = self._loop.create_task(self._labels.make(self._client, self._served))

    # --- one answer, in the engine's thread ---

    async def _answer(self, generation: VLLMGeneration) -> None:
        try:
            await self._read(generation)
            generation.emit(None)
        except asyncio.CancelledError:
            generation.emit(PrereadError("the request was cancelled", code="cancelled"))
        except EngineUnavailable as error:
            self._served = None  # it may come back as another one
            generation.emit(error)
        except Exception as error:
            if not isinstance(error, PrereadError):
                log.exception("a generation failed")
            generation.emit(error)
        finally:
            spans.record(generation)
            self._admission.leave(generation)

    async def _read(self, generation: VLLMGeneration) -> None:
        request, prepared, report = generation.request, generation.prepared, generation.report
        report.full_prefill_reason = self.full_prefill_reason
        params = sign(prepared.stored, plan_secret(self._secret)) if prepared.stored else None
        served = self._served.name if self._served else self.model_id
        sent = body(self.reader, served, request, prepared.ids, prepared.salt, params)
        writer, last = TokenWriter(self.reader, self._planner.guide, request), {}
        async with self._client.completion(sent) as events:
            generation.written, ended = 0, None
            async for event in events:
                self._seen, last = time.monotonic(), event
                for choice in event.get("choices", ()):
                    ended = self._write(generation, writer, choice) or ended
                if generation.cancelled.is_set() or (writer.finish_reason and not ended):
                    break  # vLLM, which had not come to an end itself, gives it up
        if writer.finish_reason is None and ended not in ("stop", "length"):
            raise EngineUnavailable("vLLM gave the answer up; try again in a few seconds")
        told = await self._told(params, served) if params else None
        self._settle(generation, told, last)
        finish = writer.finish_reason or ended or "stop"
        generation.outcome = Outcome(
            writer.text, finish, generation.plan.tokens, writer.count, generation.plan.chunks, report
        )

    def _write(self, generation: VLLMGeneration, writer: TokenWriter, choice: Mapping[str, Any]) -> str | None:
        """Pass on what an event holds; why vLLM has ended, if it has."""
        told = choice.get("logprobs") if generation.request.logprobs is not None else None
        for number, token in enumerate(choice.get("token_ids") or ()):
            if writer.finish_reason is not None:
                break
            if writer.count == 0:
                generation.report.ms["first_token"] = generation.elapsed_ms()
            if told is not None:
                writer.describe(token, *_likely(told, number, generation.request.logprobs or 0))
            delta = writer.write(token)
            generation.written = writer.count
            if delta:
                generation.emit(delta)
        return choice.get("finish_reason")

    async def _told(self, params: Mapping[str, Any], model: str) -> Told | None:
        """What became of the plan, for which the connector is asked once the answer has ended."""
        asking = {
            "model": model, "prompt": [0], "max_tokens": 1, "temperature": 0, "cache_salt": "preread-asks",
            "kv_transfer_params": ask(params),
        }  # fmt: skip
        try:
            async with asyncio.timeout(ASKED_S):
                while (told := read((await self._client.complete(asking)).get("kv_transfer_params"))) is None:
                    await asyncio.sleep(0.05)  # an answer that was cut short ends a step later
                return told
        except (TimeoutError, PrereadError):
            return None

    def _settle(self, generation: VLLMGeneration, told: Told | None, last: Mapping[str, Any]) -> None:
        """Complete the report by what the connector has told, or else by what vLLM counts."""
        report, plan, stored = generation.report, generation.plan, generation.prepared.stored
        if told is None:
            told = Told(reused=min(_cached(last), sum(span.length for span in stored.spans)) if stored else _cached(last))
            report.tokens_prefix = 0 if plan.frame else told.reused
        report.tokens_reused, report.tokens_recomputed = told.reused, told.recomputed
        report.tokens_computed = max(0, plan.tokens - told.reused - told.recomputed)
        report.ms |= {"fetch": told.fetch_ms, "blend": told.blend_ms} if stored else {}
        for passage in generation.prepared.passages:
            self._note(report, passage, stored, told)

    def _note(self, report: Report, passage: Passage, stored: Plan | None, told: Told) -> None:
        chunk = passage.chunk
        if self.full_prefill_reason or not parse_method(report.method).uses_stored:
            reason = "model" if self.full_prefill_reason else "method"
        elif chunk.kv_key is None:
            reason = "policy" if chunk.not_stored else "pending"
        elif stored is None:
            reason = "prefix"
        elif (missed := told.missed.get(chunk.kv_key)) is not None:
            reason = missed
        elif told.refused:
            reason = "refused"
        else:
            report.reused.append(ChunkReused(chunk.chunk_id, told.tiers.get(chunk.kv_key, "")))
            return
        report.not_reused.append(ChunkNotReused(chunk.chunk_id, reason))


def _cached(last: Mapping[str, Any]) -> int:
    """Prompt tokens whose KV vLLM had, by its usage, if it is told to say so."""
    details = (last.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _likely(told: Mapping[str, Any], number: int, most: int) -> tuple[float, list[tuple[int, float]]]:
    """The logarithm of the probability of an event's token, and the likeliest ones, the best first."""
    top = sorted((told["top_logprobs"][number] or {}).items(), key=lambda pair: -pair[1])[:most]
    return float(told["token_logprobs"][number]), [(int(name.partition(":")[2]), float(value)) for name, value in top]
