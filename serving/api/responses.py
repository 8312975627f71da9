"""POST /v1/responses with file_search: what the chat route answers, as items and as their events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from serving.api.access import Parts, Reader
from serving.api.answer import Answer, Piece, finished
from serving.api.asking import begin
from serving.api.chat_request import ChatBody, corpus_names, retrieval_query
from serving.api.citations import mentions
from serving.api.errors import BadParameter, describe
from serving.api.json_body import StrictJSON
from serving.api.logprobs import chat_logprobs
from serving.api.responses_request import RESULTS, ResponsesBody
from serving.api.shapes import answers
from serving.api.shapes.common import told
from serving.api.stream import HEARTBEAT, Stream, with_heartbeats
from serving.api.tools import Call
from serving.engine.types import TokenLogprob

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=StrictJSON)


@router.post("", response_model=None, responses=told(answers.Response))
async def create_response(parts: Parts, who: Reader, body: ResponsesBody, request: Request) -> Stream | dict[str, Any]:
    chat = body.chat()
    try:
        answer = await begin(parts, request.app.state.metrics, who, chat, request)
    except BadParameter as error:
        raise BadParameter(error.param.replace("messages", "input", 1), str(error), error.code) from error
    response = Response(answer, body, chat, searched=bool(corpus_names(chat, parts.engine.model_id)))
    if body.stream:
        return Stream(answer, response.events())
    await finished(answer, request)
    return await response.shown("completed")


class Response:
    """One answer as a response. Its items have the same ids in every event."""

    def __init__(self, answer: Answer, body: ResponsesBody, chat: ChatBody, searched: bool) -> None:
        self._answer, self._body, self._chat, self._searched = answer, body, chat, searched
        self._choice = answer.choices[0]
        self._ids = {kind: f"{kind}_{uuid.uuid4().hex}" for kind in ("fs", "msg")}
        answer.id = f"resp_{uuid.uuid4().hex}"
        self._number = 0

    async def shown(self, status: str) -> dict[str, Any]:
        """The response object. `completed`: with all of the answer."""
        done = status == "completed"
        held = await self._answer.held(self._choice) if done else frozenset()
        cut = done and self._choice.finish_reason == "length"
        sources = self._answer.provenance(self._choice, held) if done else {}
        return {
            "id": self._answer.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": "incomplete" if cut else status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self._body.instructions,
            "max_output_tokens": self._body.max_output_tokens,
            "model": self._body.model,
            "output": self._items(held) if done else [],
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._body.temperature or 0.0,
            "text": {"format": (self._body.text and self._body.text.format) or {"type": "text"}},
            "tool_choice": self._body.tool_choice or "auto",
            "tools": self._body.tools or [],
            "top_p": self._body.top_p or 1.0,
            "truncation": "disabled",
            "usage": self._usage() if done else None,
            "metadata": self._body.metadata or {},
            **sources,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._answer.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _items(self, held: frozenset[int]) -> list[dict[str, Any]]:
        items = [self._search("completed", held)] if self._searched else []
        if self._choice.text.strip() or not self._choice.calls:
            items.append(self._message("completed", [self._part(self._choice.text, self._notes(held), self._choice.tokens)]))
        return items + [_call_item(call) for call in self._choice.calls]

    def _search(self, status: str, held: frozenset[int] | None = None) -> dict[str, Any]:
        results = None
        if held is not None and self._body.wants(RESULTS):
            results = [
                {"file_id": c.file_id, "filename": c.path, "score": c.score, "text": c.text, "attributes": c.attributes}
                for c in self._choice.outcome().used_chunks
                if c.chunk_id in held
            ]
        queries = [retrieval_query(self._chat.messages)]
        return {"id": self._ids["fs"], "type": "file_search_call", "status": status, "queries": queries, "results": results}

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._ids["msg"], "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: str, notes: Sequence[dict[str, Any]], tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._answer.refused(self._choice):
            return {"type": "refusal", "refusal": text}
        return {"type": "output_text", "text": text, "annotations": list(notes), "logprobs": chat_logprobs(tokens)["content"]}

    def _notes(self, held: frozenset[int]) -> list[dict[str, Any]]:
        """The passages that the text mentions, at the end of their first mention."""
        chunks = self._choice.outcome().used_chunks
        return [
            {"type": "file_citation", "index": span[1], "file_id": chunks[n - 1].file_id, "filename": chunks[n - 1].path}
            for n, span in mentions(self._choice.text, len(chunks)).items()
            if chunks[n - 1].chunk_id in held
        ]

    async def events(self) -> AsyncIterator[str]:
        """The answer as events."""
        try:
            yield self._event("response.created", response=await self.shown("in_progress"))
            yield self._event("response.in_progress", response=await self.shown("in_progress"))
            async for each in self._running():
                yield each
            whole = await self.shown("completed")
            yield self._event(f"response.{whole['status']}", response=whole)
        except Exception as error:  # noqa: BLE001 - the status has been sent: the error goes out as an event
            told = describe(error)[1]["error"]
            yield self._event("error", **{name: told[name] for name in ("code", "message", "param")}, error=told)
        finally:
            await self._answer.close()

    async def _running(self) -> AsyncIterator[str]:
        at = 0
        if self._searched:
            for each in self._search_events():
                yield each
            at = 1
        where = {"item_id": self._ids["msg"], "output_index": at, "content_index": 0}
        begun = False
        async for step in with_heartbeats(self._answer.pieces()):
            if step is None:
                yield HEARTBEAT
            elif (piece := step[1]) is not None and piece.text:
                if not begun:
                    yield self._event("response.output_item.added", output_index=at, item=self._message("in_progress", []))
                    yield self._event("response.content_part.added", **where, part=self._part("", (), ()))
                    begun = True
                yield self._delta(where, piece)
        held = await self._answer.held(self._choice)
        if begun:
            for each in self._text_end(where, held):
                yield each
        for number, call in enumerate(self._choice.calls, at + begun):
            for each in self._call_events(number, call):
                yield each

    def _search_events(self) -> list[str]:
        where = {"item_id": self._ids["fs"], "output_index": 0}
        return [
            self._event("response.output_item.added", output_index=0, item=self._search("in_progress")),
            *(self._event(f"response.file_search_call.{step}", **where) for step in ("in_progress", "searching", "completed")),
            self._event("response.output_item.done", output_index=0, item=self._search("completed")),
        ]

    def _delta(self, where: dict[str, Any], piece: Piece) -> str:
        if self._answer.refused(self._choice):
            return self._event("response.refusal.delta", **where, delta=piece.text)
        told = chat_logprobs(piece.tokens)["content"]
        return self._event("response.output_text.delta", **where, delta=piece.text, logprobs=told)

    def _text_end(self, where: dict[str, Any], held: frozenset[int]) -> list[str]:
        notes, text = self._notes(held), self._choice.text
        part = self._part(text, notes, self._choice.tokens)
        added = [
            self._event("response.output_text.annotation.added", **where, annotation_index=number, annotation=note)
            for number, note in enumerate(notes)
        ]
        if self._answer.refused(self._choice):
            done = self._event("response.refusal.done", **where, refusal=text)
        else:
            done = self._event("response.output_text.done", **where, text=text, logprobs=part["logprobs"])
        return [
            *added,
            done,
            self._event("response.content_part.done", **where, part=part),
            self._event("response.output_item.done", output_index=where["output_index"], item=self._message("completed", [part])),
        ]

    def _call_events(self, number: int, call: Call) -> list[str]:
        item = _call_item(call)
        where = {"item_id": item["id"], "output_index": number}
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=number, item=begun),
            self._event("response.function_call_arguments.delta", **where, delta=call.arguments),
            self._event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=number, item=item),
        ]

    def _event(self, kind: str, **fields: Any) -> str:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _call_item(call: Call) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id.removeprefix('call_')}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
