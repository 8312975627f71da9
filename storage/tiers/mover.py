"""Moving copies between tiers in the background: few at a time, and never at the cost of a reader."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class Mover:
    """A bounded queue of jobs and the one thread that does them. The thread is there while there is work."""

    def __init__(self, name: str, max_jobs: int, max_bytes: int = 0) -> None:
        """`max_bytes` bounds what waiting jobs keep in memory, as they state it."""
        self._name, self._max_jobs, self._max_bytes = name, max_jobs, max_bytes
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._bytes = 0
        self._running = False
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], object], size: int = 0) -> bool:
        """Queue a job that keeps `size` bytes; False if the queue is full. Never waits."""
        with self._changed:
            if len(self._jobs) >= self._max_jobs or self._bytes + size > self._max_bytes:
                return False
            if not self._running:
                try:  # a daemon: what it has not moved at exit is only not moved
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                except RuntimeError:  # no more threads are to be had, or the process is about to end
                    return False
                self._running = True
            self._jobs.append((job, size))
            self._bytes += size
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or being moved; False if that took too long."""
        end = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout=end - time.monotonic())

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._running = False
                    self._changed.notify_all()
                    return
                job, size = self._jobs.popleft()
            try:
                job()
            except Exception:
                log.exception("moving KV between tiers failed")
            del job  # with the buffers it holds
            with self._changed:
                self._bytes -= size
