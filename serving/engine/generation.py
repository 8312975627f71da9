"""A running answer between the thread that makes it and the event loop that sends it on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

from serving.engine.types import Delta, Outcome, Report
from serving.prompt import PromptPlan
from storage import tracing
from storage.errors import Cancelled, PrereadError

BACKLOG = 1024  # pieces of an answer that wait for their reader at most


class Emitted:
    """See `types.Generation`. Made by the event loop's thread, fed by the engine's. `written`: tokens of the answer; None until
    the engine takes it up."""

    def __init__(self, plan: PromptPlan, report: Report) -> None:
        self.plan, self.report = plan, report
        self.outcome: Outcome | None = None
        self.cancelled = threading.Event()
        self.context = tracing.here()
        self.written: int | None = None
        self.born = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    def emit(self, event: Delta | Exception | None) -> None:
        """An answer that nobody reads is given up: it must not hold memory for as long as its client likes."""
        if isinstance(event, Delta) and self._events.qsize() >= BACKLOG:
            if self.cancelled.is_set():
                return
            self.cancelled.set()
            event = Cancelled("The answer was given up: its client reads too slowly.")
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def cancel(self) -> None:
        self.end(PrereadError("the request was cancelled", code="cancelled"))

    def end(self, error: PrereadError) -> None:
        """Compute no more of it."""
        self.cancelled.set()
        self.emit(error)

    def so_far(self) -> Outcome | None:
        """See `Generation.so_far`."""
        if self.outcome is not None or self.written is None:
            return self.outcome
        return Outcome("", "cancelled", self.plan.tokens, self.written, self.plan.chunks, self.report)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.born) * 1000
