"""Clients that do not read what they asked for.

The server stops writing to a connection whose buffer (64 KiB) is full, so that a route waits with its next piece, and its
answer with it. Here that wait has an end: then the connection is cut, which ends the response as any disconnect does.
What is left in the buffer when a response is over is given the same time.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STALLED_SECONDS = 60.0  # for what fits the buffer: slower than about a kilobyte a second is as good as not at all
LOOK_SECONDS = 1.0

log = structlog.get_logger(__name__)


class CutUnread:
    """Outermost, as it takes the connection from the server's own `receive`; other servers' are left alone."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._left: WeakKeyDictionary[asyncio.Transport, asyncio.TimerHandle] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = getattr(getattr(receive, "__self__", None), "transport", None)
        if scope["type"] != "http" or transport is None:
            await self.app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        if (timer := self._left.pop(transport, None)) is not None:
            timer.cancel()  # from now on this response's own pieces are waited for

        async def timely(message: Message) -> None:
            timer = loop.call_later(STALLED_SECONDS, _cut, transport)
            try:
                await send(message)
            finally:
                timer.cancel()
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self._look(transport, loop.time() + STALLED_SECONDS)

        await self.app(scope, receive, timely)

    def _look(self, transport: Any, end: float) -> None:
        """Cut the connection at `end` if its buffer is never empty until then."""
        loop = asyncio.get_running_loop()
        if not transport.get_write_buffer_size():
            self._left.pop(transport, None)
        elif loop.time() >= end:
            _cut(transport)
        else:
            pause = min(LOOK_SECONDS, STALLED_SECONDS)
            self._left[transport] = loop.call_later(pause, self._look, transport, end)


def _cut(transport: Any) -> None:
    log.warning("a client did not read its answer; its connection was cut", unread=transport.get_write_buffer_size())
    transport.abort()
