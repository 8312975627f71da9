"""Who may enter the engine, and when those who may not should come back.

The queue is bounded twice: by number, and by the time until a place is free at the pace that was measured. A queue in which
everybody waits too long serves nobody in time, although the engine works all the while.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from storage.errors import Overloaded, PrereadError

if TYPE_CHECKING:
    from serving.engine.generation import Emitted

WAIT_S = 5.0  # for a place among those that are answered at once
LONGEST_RETRY_S = 60
WEIGHT = 0.2  # of the newest interval in the moving average


class Admission:
    """Threads share it. `active`: answered at once; `waiting`: so many more may be there."""

    def __init__(self, active: int, waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.active, self.waiting, self._clock = active, waiting, clock
        self._live: set[Emitted] = set()
        self._lock = threading.Lock()
        self._interval: float | None = None  # seconds from one answer's end to the next, while there is work
        self._since = 0.0

    def live(self) -> list[Emitted]:
        with self._lock:
            return list(self._live)

    def end_all(self, error: PrereadError) -> None:
        """End every answer that is there with this error."""
        for generation in self.live():
            generation.end(error)

    def check(self) -> None:
        """Raises Overloaded if there is no room for one more."""
        with self._lock:
            self._check()

    def enter(self, generation: Emitted) -> None:
        """Raises Overloaded."""
        with self._lock:
            self._check()
            if not self._live:
                self._since = self._clock()
            self._live.add(generation)

    def leave(self, generation: Emitted) -> None:
        """What was cancelled says nothing about the pace."""
        with self._lock:
            self._live.discard(generation)
            if generation.outcome is not None:
                now = self._clock()
                took, self._since = now - self._since, now
                before = took if self._interval is None else self._interval
                self._interval = WEIGHT * took + (1 - WEIGHT) * before

    def _check(self) -> None:
        count, pace = len(self._live), self._interval
        wait = max(0, count + 1 - self.active) * (pace or 0.0)
        if count < self.active + self.waiting and wait <= WAIT_S:
            return
        if pace is None:
            raise Overloaded("too many requests wait already; try again in a few seconds")
        # By then those who are here have been answered.
        seconds = min(LONGEST_RETRY_S, max(1, math.ceil(count * pace)))
        raise Overloaded(f"too many requests wait already; try again in {seconds} s", retry_after=seconds)
