"""The server's side of a connection, with patience that ends: who opens one and does not send a whole request is not kept.

uvicorn waits for ever for the head of a request once its first byte has come. Bodies have their own pace (`BodyLimit`)."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0


class PatientProtocol(H11Protocol):
    """A connection that is closed when no head of a request is whole in time."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._closing is None:  # the beginning of the next head
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._closing = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._closing = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
