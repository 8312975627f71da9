"""A circuit breaker: after some failures in a row a server is left alone, and asked again by one request at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from storage.errors import StorageUnavailable


class Breaker:
    """Closed; open after `threshold` failures in a row; half-open after `cool_down_s`. Safe to share between threads.

    Half-open, one request at a time goes through as a probe: its success closes the breaker, its failure opens it for
    another `cool_down_s`. A probe that is never heard of again is given up after `probe_s`, so that nothing keeps the
    breaker open for ever. `server`: what messages call it.
    """

    def __init__(
        self,
        threshold: int = 8,
        cool_down_s: float = 5.0,
        probe_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        server: str = "object store",
    ) -> None:
        self._server = server
        self._threshold, self._cool_down_s, self._probe_s, self._clock = threshold, cool_down_s, probe_s, clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._probe_at = 0.0
        self._opened = self._refused = 0

    def enter(self) -> bool:
        """Ask to send a request; True if it is the probe. Raises StorageUnavailable while the breaker is open."""
        with self._lock:
            if self._failures < self._threshold:
                return False
            now = self._clock()
            if now < self._probe_at:
                self._refused += 1
                raise StorageUnavailable(f"{self._server}: not asked, it failed {self._failures} times in a row")
            self._probe_at = now + self._probe_s
            return True

    def succeeded(self) -> None:
        """The server has answered, if only with a refusal of this one request."""
        with self._lock:
            self._failures = 0

    def failed(self, probe: bool) -> None:
        """The server did not answer, or said that it is in trouble. `probe` is what `enter` returned."""
        with self._lock:
            self._failures += 1
            if self._failures == self._threshold:
                self._opened += 1
            # Not for those that were already on their way when it opened: they would put the probe off.
            if self._failures == self._threshold or probe:
                self._probe_at = self._clock() + self._cool_down_s

    def counters(self) -> dict[str, int]:
        """breaker_open (0 or 1), how often it opened, and how many requests it has refused."""
        with self._lock:
            is_open = int(self._failures >= self._threshold)
            return {"breaker_open": is_open, "breaker_opened": self._opened, "breaker_refused": self._refused}
