"""Requests that are tried again: exponential pauses with full jitter, one deadline over all of it, a circuit breaker.

Full jitter, a pause drawn evenly from 0 to its bound, spreads clients best: M. Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from storage.breaker import Breaker
from storage.deadline import latest_end

T = TypeVar("T")
BASE_S = 0.1
CAP_S = 5.0
FAIR_S = 1.0  # what timed out sooner was in a hurry, which says nothing about the server


class DeadlinePassed(TimeoutError):
    """The time that a request had, all its attempts together, is over."""


class Retry:
    """Runs requests against one server. `is_trouble(error)`: the server's trouble, which another try may not meet."""

    def __init__(
        self,
        is_trouble: Callable[[Exception], bool],
        breaker: Breaker,
        *,
        attempts: int = 4,
        deadline_s: float = 60.0,
    ) -> None:
        self._is_trouble, self._breaker = is_trouble, breaker
        self._attempts, self._deadline_s = attempts, deadline_s
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def run(self, act: Callable[[float], T]) -> T:
        """`act(end)` until it succeeds; it must not go on past `end` of the monotonic clock.

        Raises its last error, or StorageUnavailable while the breaker is open."""
        probe = self._breaker.enter()
        started = time.monotonic()
        end = latest_end(self._deadline_s)
        for attempt in itertools.count(1):
            self._count("requests")
            try:
                result = act(end)
            except Exception as error:
                if not self._is_trouble(error):
                    self._breaker.succeeded()
                    raise
                pause = random.uniform(0, min(CAP_S, BASE_S * 2 ** (attempt - 1)))
                if attempt == self._attempts or time.monotonic() + pause >= end:
                    late = time.monotonic() >= end
                    hurried = (late or isinstance(error, TimeoutError)) and time.monotonic() - started < FAIR_S
                    self._fail(probe, hurried)
                    if late:  # whatever a library below has made of it
                        raise DeadlinePassed("the deadline has passed") from error
                    raise
                self._count("retries")
                time.sleep(pause)
            else:
                self._breaker.succeeded()
                return result
        raise AssertionError("unreachable")

    def _fail(self, probe: bool, hurried: bool) -> None:
        self._count("failures")
        if probe or not hurried:
            self._breaker.failed(probe)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def counters(self) -> dict[str, int]:
        """requests sent, retries among them, failures after all attempts; and the breaker's own."""
        with self._lock:
            counts = {name: self._counts[name] for name in ("requests", "retries", "failures")}
        return counts | self._breaker.counters()
