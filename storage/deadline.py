"""Until when the work at hand is of use. Whoever waits says so once; stores below read it, whatever is in between."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

_end: ContextVar[float] = ContextVar("end", default=math.inf)


@contextlib.contextmanager
def until(end: float) -> Iterator[None]:
    """Inside, nothing is waited for past `end` of the monotonic clock, nor past an outer `until`."""
    token = _end.set(min(end, _end.get()))
    try:
        yield
    finally:
        _end.reset(token)


def latest_end(seconds: float) -> float:
    """When work that may take `seconds` from now has to end, on the monotonic clock."""
    return min(time.monotonic() + seconds, _end.get())
