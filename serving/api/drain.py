"""The end of a process that answers: nothing new is taken, and what has begun is finished."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.errors import error_response
from serving.engine.types import Engine
from storage.errors import Stopping

GRACE_SECONDS = 30.0  # for what goes on when the process is told to end
PROBES = ("/healthz", "/readyz", "/metrics")  # are answered to the end, and hold nothing up


class Drain:
    """Whether the process has been told to end, and whether it may. `begin` may be called by a signal handler."""

    def __init__(self, engine: Engine, grace: float = GRACE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._grace, self._clock = engine, grace, clock
        self._until: float | None = None
        self.running = 0  # requests

    @property
    def begun(self) -> bool:
        return self._until is not None

    def begin(self) -> None:
        self._until = self._clock() + self._grace
        self._engine.drain()

    def over(self) -> bool:
        """Whether all that had begun has ended. When the grace is over, answers end with an error."""
        if self._until is None:
            return False
        if self.running and self._clock() < self._until:
            return False
        self._engine.abandon()
        return True


class Draining:
    """Counts what goes on, and refuses what comes after the process was told to end."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self.app(scope, receive, send)
        elif self.drain.begun:
            refusal = error_response(Stopping())
            refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
        else:
            self.drain.running += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self.drain.running -= 1
