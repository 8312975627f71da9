"""Load or compute: how long a prompt waits for stored KV before its first tokens are computed meanwhile.

The published rule is r* = t_load / (t_compute + t_load), the share that is best computed; both ends at once find it by
themselves (see `serving.blend.late`), so all that is decided here is when to begin.
"""

from __future__ import annotations

import threading

WEIGHT = 0.3  # of the newest measurement in the moving average
# The wait is all that a source which stalls adds to a full prefill: what is computed then is computed once, in the same
# passes. With a goal of 1.2 of full prefill, this leaves as much again for a machine that is busy.
PATIENCE = 0.1  # of the time that computing everything would take: so long a source may keep us waiting
FLOOR_S = 0.1  # a wait that nobody feels, also where a prompt is computed in less than a second


class Rates:
    """A moving average of the tokens whose stored KV comes per second. Threads share it."""

    def __init__(self, floor_s: float | None = None) -> None:
        self._floor_s = floor_s
        self._load: float | None = None
        self._lock = threading.Lock()

    def note_load(self, tokens: int, seconds: float) -> None:
        """Stored KV of so many tokens has come in this time, or has not come yet (0 tokens)."""
        rate = tokens / max(seconds, 1e-6)
        with self._lock:
            self._load = rate if self._load is None else WEIGHT * rate + (1 - WEIGHT) * self._load

    @property
    def load_tokens_per_s(self) -> float | None:
        return self._load

    def patience_s(self, tokens: int, prefill_tokens_per_s: float | None) -> float:
        """How long to wait for the stored KV of `tokens` tokens before computing them from the other end.

        For a source known to take longer than that, the floor."""
        floor = FLOOR_S if self._floor_s is None else self._floor_s
        compute_s = tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
        patience = max(floor, PATIENCE * compute_s)
        slow = self._load is not None and tokens > self._load * patience
        return floor if slow else patience
