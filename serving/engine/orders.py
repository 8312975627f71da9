"""Orders of passages that come again with other questions.

A blend chooses by its question, so that another question over the same passages in the same order is blended anew, for about
a third of full prefill. An order that comes again is read in full instead: exactly, and once, since vLLM's own prefix cache
then has all but the question.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

RECENT_S = 600.0  # what was used less lately may have left vLLM's cache
MOST = 4096


class Orders:
    """Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, tuple[str, float]] = OrderedDict()  # by order: the conversation that it came with first
        self._lock = threading.Lock()

    def comes_again(self, order: str, thread: str) -> bool:
        """Whether another conversation than this one (`thread`) has brought `order` first, not long ago. The first one goes on
        with what was blended for it."""
        now = self._clock()
        with self._lock:
            first, last = self._seen.pop(order, (thread, now))
            if now - last > RECENT_S:
                first = thread
            self._seen[order] = first, now
            while len(self._seen) > MOST:
                self._seen.popitem(last=False)
            return first != thread
