"""From a request to generations that are queued: its corpora, what is retrieved of them, and what is asked of the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import Request

from serving.api import tools
from serving.api.answer import Answer, Choice
from serving.api.chat_request import ChatBody, corpus_names, retrieval_query
from serving.api.metrics import Metrics
from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors import corpora, search, settings
from serving.emphasis import emphasis_of
from serving.engine.types import Emphasis, GenerateRequest, Message
from storage.catalogue.usage import TASKS
from storage.errors import NotFound
from storage.types import RetrievedChunk

# Stands where passages would: a model with functions is asked all the same, since one of them may know.
NONE_FOUND = Message("system", "(No passage was found for this question. Say so, unless the result of a function answers it.)")


def check_model(parts: ApiParts, model: str) -> None:
    """Raises NotFound for a model that is not served."""
    served = parts.engine.model_id
    if model != served and not model.startswith(f"{served}@"):
        raise NotFound(
            f"The model {model!r} does not exist or you do not have access to it.", code="model_not_found"
        )


async def begin(parts: ApiParts, metrics: Metrics, who: Principal, body: ChatBody, request: Request) -> Answer:
    """Retrieve, and queue the generations. Raises what refuses the request as a whole."""
    body.check()
    check_model(parts, body.model)
    parts.engine.check_room()
    messages, offered, named = body.plain_messages(), body.functions(), corpus_names(body, parts.engine.model_id)
    asked = _asked(parts, body)
    needs_context = asked.needs_chunks
    chunks: tuple[RetrievedChunk, ...] = ()
    emphasis: dict[int, tuple[Emphasis, ...]] = {}
    emphasis_of((), body.preread.emphasis if body.preread else {}, {})  # refuses nonsense, whatever is found
    ids = await to_thread.run_sync(corpora.resolve, parts, who, named) if named else ()
    is_task = body.is_housekeeping()
    answer = Answer(
        body.model, str(request.base_url), metrics, [], partial(search.still_there, parts, who),
        partial(parts.meter.note, who.tenant_id, (TASKS,) if is_task else ids), per_prompt=body.n or 1,
        refuses=needs_context or asked.shape is not None, logprobs=bool(body.logprobs),
    )  # fmt: skip
    search_for = bool(ids) and not is_task
    if search_for:
        before = time.perf_counter()
        chunks, emphasis = await to_thread.run_sync(_retrieve, parts, who, ids, body)
        answer.retrieval_ms = 1000 * (time.perf_counter() - before)
        answer.nothing_found = not chunks
    if not chunks and (needs_context or (search_for and offered is None)):
        answer.choices = [Choice(number, None) for number in range(body.n or 1)]
        return answer
    if offered is not None:
        messages = tools.with_rules(messages, offered)
    if answer.nothing_found:
        messages = (NONE_FOUND, *messages)
    asked = replace(asked, messages=messages, chunks=chunks, emphasis=emphasis, grounded=search_for)
    if not named:
        known = await to_thread.run_sync(search.known, parts, who, messages, asked.method)
        asked = replace(asked, known=known, scope=who.scope)
    await submit(parts, answer, [replace(asked, **body.sampling(number)) for number in range(body.n or 1)], offered)
    return answer


async def submit(
    parts: ApiParts, answer: Answer, requests: Sequence[GenerateRequest], offered: tools.Tools | None = None
) -> None:
    """Queue a generation for each choice: all or none. Each prompt is prepared once, away from the event loop."""
    prepared: dict[Any, Any] = {}
    for request in requests:
        if request.prompt not in prepared:
            prepared[request.prompt] = await to_thread.run_sync(parts.engine.prepare, request)
    try:
        for request in requests:
            generation = parts.engine.submit(request, prepared[request.prompt])
            answer.choices.append(Choice(len(answer.choices), generation, offered))
    except BaseException:
        answer.cancel()
        raise


def _retrieve(
    parts: ApiParts, who: Principal, ids: tuple[str, ...], body: ChatBody
) -> tuple[tuple[RetrievedChunk, ...], dict[int, tuple[Emphasis, ...]]]:
    query, top_k = retrieval_query(body.messages), body.top_k(parts.settings.top_k)
    as_of = body.preread.as_of if body.preread else None
    limits = (as_of, body.filters(), body.min_score(), body.rerank())
    chunks = search.chunks(parts, who, ids, query, top_k, parts.settings.context_tokens, *limits)
    asked = body.preread.emphasis if body.preread else {}
    return chunks, emphasis_of(chunks, asked, settings.standing_emphasis(parts, ids))


def _asked(parts: ApiParts, body: ChatBody) -> GenerateRequest:
    """What the request asks of the engine, before anything is looked up. Raises BadParameter."""
    offered = body.functions()
    return GenerateRequest(
        messages=(),
        method=body.preread.method if body.preread and body.preread.method else parts.settings.method,
        max_tokens=body.max_completion_tokens or body.max_tokens or GenerateRequest.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        shape=(offered.shape() if offered else None) or body.shape(),
        needs_chunks=bool(body.preread and body.preread.require_context),
        **body.sampling(0),
    )
