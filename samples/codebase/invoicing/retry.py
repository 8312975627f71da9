"""Repeats a call that may fail for a short time.

The waiting time doubles from 0.5 seconds up to a ceiling of 20 seconds. Each
wait is spread at random between half and the whole of that time, so that many
clients that failed together do not come back together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Calls in all, the first included.
MAX_ATTEMPTS = 5
FIRST_WAIT_S = 0.5
CEILING_S = 20.0


class Transient(Exception):
    """A failure worth repeating: a timeout, or an answer 429, 502, 503 or 504."""


class RetriesExhausted(Exception):
    """Every attempt failed; the last failure is the cause."""

    def __init__(self, attempts: int) -> None:
        super().__init__(f"gave up after {attempts} attempts")
        self.attempts = attempts


def wait_before(attempt: int, rng: random.Random) -> float:
    """Return the seconds to wait before ``attempt``, which counts from 1.

    There is no wait before the first attempt.
    """
    if attempt <= 1:
        return 0.0
    longest = min(CEILING_S, FIRST_WAIT_S * 2.0 ** (attempt - 2))
    return rng.uniform(longest / 2, longest)


def retry(
    call: Callable[[], T],
    *,
    attempts: int = MAX_ATTEMPTS,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> T:
    """Call until it succeeds. Only ``Transient`` failures are repeated."""
    if attempts < 1:
        raise ValueError("attempts must be at least 1")
    rng = rng or random.Random()
    last: Transient | None = None
    for attempt in range(1, attempts + 1):
        pause = wait_before(attempt, rng)
        if pause > 0:
            sleep(pause)
        try:
            return call()
        except Transient as failure:
            last = failure
    raise RetriesExhausted(attempts) from last
