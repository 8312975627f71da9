"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.api.answer import Answer
from serving.api.errors import describe

HEARTBEAT_SECONDS = 15.0
HEARTBEAT = ": waiting\n\n"
DONE = "data: [DONE]\n\n"
T = TypeVar("T")


class Stream(StreamingResponse):
    """An answer's events; however the response ends, the work does too, and what it has cost is counted."""

    def __init__(self, answer: Answer, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.answer.close()


async def guarded(answer: Answer, events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, an error among them as OpenAI's clients expect it, and the line that ends all."""
    try:
        async for each in events:
            yield each
    except Exception as error:  # noqa: BLE001 - the status has been sent: the error goes out as a frame
        yield event(describe(error)[1])
    finally:
        await answer.close()
    yield DONE


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def with_heartbeats(items: AsyncIterator[T]) -> AsyncIterator[T | None]:
    """The items, and None whenever none came for a while."""
    waiting: asyncio.Future[T] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(items))
            done, _ = await asyncio.wait([waiting], timeout=HEARTBEAT_SECONDS)
            if not done:
                yield None
                continue
            ready, waiting = waiting, None
            try:
                yield ready.result()
            except StopAsyncIteration:
                return
    finally:
        if waiting is not None:
            waiting.cancel()
