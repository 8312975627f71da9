"""An answer from retrieval to its last byte: what was found, what is generated, how both look outside."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.api.chat_request import ChatBody, corpus_names, retrieval_query
from serving.api.citations import citations, url_citations
from serving.api.errors import describe
from serving.api.metrics import Metrics
from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors import corpora, search, settings
from serving.emphasis import emphasis_of
from serving.engine.types import Emphasis, GenerateRequest, Generation, Outcome, Report
from storage.errors import Cancelled, NotFound
from storage.types import RetrievedChunk

HEARTBEAT_SECONDS = 15.0
NOTHING_FOUND = "I found nothing about this in the selected documents."


@dataclass
class Answer:
    """One answer on its way. `generation` None: nothing was found, and the fixed sentence is the answer."""

    model: str
    base_url: str
    metrics: Metrics
    generation: Generation | None
    still_there: Callable[[Sequence[RetrievedChunk]], frozenset[int]]
    note: Callable[[Outcome], None]
    retrieval_ms: float | None = None
    started: float = field(default_factory=time.perf_counter)
    first_text_ms: float | None = None
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def texts(self) -> AsyncIterator[str]:
        """The answer's text as it comes."""
        if self.generation is None:
            yield NOTHING_FOUND
            return
        async for delta in self.generation:
            if self.first_text_ms is None:
                self.first_text_ms = 1000 * (time.perf_counter() - self.started)
                self.metrics.ttft.observe(self.first_text_ms / 1000)
            yield delta.text

    def outcome(self) -> Outcome:
        """How it ended; counted here, once. Raises Cancelled if it was stopped before its end."""
        if self.generation is None:
            return Outcome(NOTHING_FOUND, "stop", 0, 0, (), Report(method="none"))
        if self.generation.outcome is None:
            raise Cancelled("The answer was cancelled.")
        self.metrics.note_answer(self.generation.outcome.report, self.generation.outcome.completion_tokens)
        self.note(self.generation.outcome)
        return self.generation.outcome

    def cancel(self) -> None:
        if self.generation is not None:
            self.generation.cancel()

    def envelope(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}

    async def held(self, outcome: Outcome) -> frozenset[int]:
        """The chunks that may be cited: what was deleted or replaced while we answered is not."""
        if not outcome.used_chunks:
            return frozenset()
        return await to_thread.run_sync(self.still_there, outcome.used_chunks)

    def provenance(self, outcome: Outcome, held: frozenset[int]) -> dict[str, Any]:
        """What stands beside OpenAI's fields: sources, and how the prompt's KV came about."""
        report = asdict(outcome.report)
        report["ms"] = {**report["ms"]}
        if self.retrieval_ms is not None:
            report["ms"]["retrieval"] = round(self.retrieval_ms, 2)
        return {"citations": citations(outcome.text, outcome.used_chunks, held), "preread": report}

    def notes(self, outcome: Outcome, held: frozenset[int]) -> list[dict[str, Any]]:
        return url_citations(outcome.text, outcome.used_chunks, held, self.base_url)


async def begin(
    parts: ApiParts, metrics: Metrics, who: Principal, body: ChatBody, request: Request
) -> Answer:
    """Retrieve, and queue the generation. Raises what refuses the request as a whole."""
    body.check()
    started = time.perf_counter()
    model_id = parts.engine.model_id
    if body.model != model_id and not body.model.startswith(f"{model_id}@"):
        raise NotFound(
            f"The model {body.model!r} does not exist or you do not have access to it.",
            code="model_not_found",
        )
    parts.engine.check_room()
    messages = body.plain_messages()
    named = corpus_names(body, model_id)
    still_there = partial(search.still_there, parts, who)
    chunks: tuple[RetrievedChunk, ...] = ()
    emphasis: dict[int, tuple[Emphasis, ...]] = {}
    emphasis_of((), body.preread.emphasis if body.preread else {}, {})  # refuses nonsense, whatever is found
    ids = await to_thread.run_sync(corpora.resolve, parts, who, named) if named else ()
    note = partial(parts.meter.note, who.tenant_id, ids)
    answer = Answer(body.model, str(request.base_url), metrics, None, still_there, note, started=started)
    if named:
        before = time.perf_counter()
        chunks, emphasis = await to_thread.run_sync(_retrieve, parts, who, ids, messages, body)
        answer.retrieval_ms = 1000 * (time.perf_counter() - before)
    if chunks or not named:
        answer.generation = parts.engine.submit(_generate_request(parts, body, messages, chunks, emphasis))
    return answer


def _retrieve(
    parts: ApiParts, who: Principal, ids: tuple[str, ...], messages: Any, body: ChatBody
) -> tuple[tuple[RetrievedChunk, ...], dict[int, tuple[Emphasis, ...]]]:
    query, top_k = retrieval_query(messages), body.top_k(parts.settings.top_k)
    as_of = body.preread.as_of if body.preread else None
    chunks = search.chunks(parts, who, ids, query, top_k, parts.settings.context_tokens, as_of)
    asked = body.preread.emphasis if body.preread else {}
    return chunks, emphasis_of(chunks, asked, settings.standing_emphasis(parts, ids))


def _generate_request(
    parts: ApiParts,
    body: ChatBody,
    messages: Any,
    chunks: tuple[RetrievedChunk, ...],
    emphasis: dict[int, tuple[Emphasis, ...]],
) -> GenerateRequest:
    method = body.preread.method if body.preread and body.preread.method else parts.settings.method
    return GenerateRequest(
        messages=messages,
        chunks=chunks,
        method=method,
        max_tokens=body.max_completion_tokens or body.max_tokens or GenerateRequest.max_tokens,
        temperature=0.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=body.stops(),
        emphasis=emphasis,
    )


@asynccontextmanager
async def cancelled_with(request: Request, answer: Answer) -> AsyncIterator[None]:
    """Cancel the answer as soon as its client is gone, and in any case when the block ends."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        answer.cancel()


async def whole(answer: Answer, request: Request) -> dict[str, Any]:
    """The answer as one chat.completion."""
    async with cancelled_with(request, answer):
        async for _ in answer.texts():
            pass
    outcome = answer.outcome()
    held = await answer.held(outcome)
    message = {
        "role": "assistant",
        "content": outcome.text,
        "refusal": None,
        "annotations": answer.notes(outcome, held),
    }
    choice = {"index": 0, "message": message, "finish_reason": outcome.finish_reason, "logprobs": None}
    return {
        **answer.envelope("chat.completion"),
        "choices": [choice],
        "usage": usage(outcome),
        **answer.provenance(outcome, held),
    }


def usage(outcome: Outcome) -> dict[str, Any]:
    """OpenAI's usage; reused tokens are its cached tokens."""
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.report.tokens_reused},
    }


class Stream(StreamingResponse):
    """The answer as server-sent events; however the response ends, the work does too."""

    def __init__(self, answer: Answer, include_usage: bool) -> None:
        super().__init__(frames(answer, include_usage), media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.cancel()


async def frames(answer: Answer, include_usage: bool) -> AsyncIterator[str]:
    """The answer as server-sent events: role, texts, the end with its sources, usage if asked, [DONE]."""
    try:
        yield _chunk(answer, {"role": "assistant", "content": ""}, include_usage)
        async for text in with_heartbeats(answer.texts()):
            yield ": waiting\n\n" if text is None else _chunk(answer, {"content": text}, include_usage)
        outcome = answer.outcome()
        held = await answer.held(outcome)
        extra = answer.provenance(outcome, held)
        notes = answer.notes(outcome, held)
        yield _chunk(
            answer, {"annotations": notes} if notes else {}, include_usage, outcome.finish_reason, extra
        )
        if include_usage:
            yield _event({**answer.envelope("chat.completion.chunk"), "choices": [], "usage": usage(outcome)})
    except Exception as error:  # noqa: BLE001 - the status has been sent: the error goes out as a frame
        yield _event(describe(error)[1])
    finally:
        answer.cancel()
    yield "data: [DONE]\n\n"


async def with_heartbeats(texts: AsyncIterator[str]) -> AsyncIterator[str | None]:
    """The texts, and None whenever none came for a while."""
    waiting: asyncio.Future[str] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(texts))
            done, _ = await asyncio.wait([waiting], timeout=HEARTBEAT_SECONDS)
            if not done:
                yield None
                continue
            finished, waiting = waiting, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if waiting is not None:
            waiting.cancel()


def _chunk(
    answer: Answer,
    delta: dict[str, Any],
    include_usage: bool,
    finish_reason: str | None = None,
    extra: dict[str, Any] | None = None,
) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    usage_field = {"usage": None} if include_usage else {}
    return _event(
        {**answer.envelope("chat.completion.chunk"), "choices": [choice], **usage_field, **(extra or {})}
    )


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
