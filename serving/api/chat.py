"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request

from serving.api.access import Parts, Reader
from serving.api.answer import Answer, Choice, Piece, finished
from serving.api.asking import begin
from serving.api.chat_request import ChatBody
from serving.api.json_body import StrictJSON
from serving.api.logprobs import chat_logprobs
from serving.api.shapes import answers
from serving.api.shapes.common import told
from serving.api.stream import HEARTBEAT, Stream, event, guarded, with_heartbeats

router = APIRouter(prefix="/v1/chat", tags=["chat"], route_class=StrictJSON)


@router.post("/completions", response_model=None, responses=told(answers.ChatCompletion))
async def create_chat_completion(parts: Parts, who: Reader, body: ChatBody, request: Request) -> Stream | dict[str, Any]:
    answer = await begin(parts, request.app.state.metrics, who, body, request)
    if body.stream:
        return Stream(answer, guarded(answer, _frames(answer, body.include_usage)))
    return await _whole(await finished(answer, request))


async def _whole(answer: Answer) -> dict[str, Any]:
    held = [await answer.held(choice) for choice in answer.choices]
    return {
        **answer.envelope("chat.completion"),
        "choices": [_choice(answer, *each) for each in zip(answer.choices, held, strict=True)],
        "usage": answer.usage(),
        **answer.provenance(answer.choices[0], held[0]),
    }


def _choice(answer: Answer, choice: Choice, held: frozenset[int]) -> dict[str, Any]:
    refused = answer.refused(choice)
    message = {
        "role": "assistant",
        "content": None if refused or (choice.calls and not choice.text.strip()) else choice.text,
        "refusal": choice.text if refused else None,
        "annotations": answer.notes(choice, held),
    }
    if choice.calls:
        message["tool_calls"] = [call.shown() for call in choice.calls]
    return {
        "index": choice.index,
        "message": message,
        "finish_reason": choice.finish_reason,
        "logprobs": chat_logprobs(choice.tokens) if answer.logprobs else None,
    }


async def _frames(answer: Answer, include_usage: bool) -> AsyncIterator[str]:
    """The answer as server-sent events: role, texts, the end with its sources, usage if asked."""

    def frame(choice: Choice, delta: dict[str, Any], **extra: Any) -> str:
        told = {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None}
        told.update({name: extra.pop(name) for name in ("finish_reason", "logprobs") if name in extra})
        usage_field = {"usage": None} if include_usage else {}
        return event({**answer.envelope("chat.completion.chunk"), "choices": [told], **usage_field, **extra})

    for choice in answer.choices:
        yield frame(choice, {"role": "assistant", "content": ""})
    async for step in with_heartbeats(answer.pieces()):
        if step is None:
            yield HEARTBEAT
            continue
        choice, piece = step
        if piece is not None:
            yield frame(choice, _delta(answer, choice, piece), logprobs=chat_logprobs(piece.tokens) if piece.tokens else None)
            continue
        held = await answer.held(choice)
        extra = answer.provenance(choice, held) if choice.index == 0 else {}
        notes = answer.notes(choice, held)
        yield frame(choice, {"annotations": notes} if notes else {}, finish_reason=choice.finish_reason, **extra)
    if include_usage:
        yield event({**answer.envelope("chat.completion.chunk"), "choices": [], "usage": answer.usage()})


def _delta(answer: Answer, choice: Choice, piece: Piece) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if piece.text or not piece.calls:
        delta["refusal" if answer.refused(choice) else "content"] = piece.text
    if piece.calls:
        delta["tool_calls"] = [{"index": i, **call.shown()} for i, call in enumerate(piece.calls, piece.calls_at)]
    return delta
