"""Load or compute: which of a prompt's stored KV is waited for, and how long, before its tokens are computed.

The published rule is r* = t_load / (t_compute + t_load), the share that is best computed (Jin et al., "Compute Or Load KV
Cache? Why Not Both?", 2024). Where computing goes on while KV comes, both ends at once find that share by themselves (see
`serving.blend.late`), and all that is decided here is whether to begin later than at once. The wait is all that a source which
stalls adds to a full prefill: of a goal of 1.2, a tenth leaves as much again for a machine that is busy.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping

WEIGHT = 0.5  # of the newest measurement in the moving average
PATIENCE = 0.1  # of the time that computing everything would take
FLOOR_S = 0.1  # a wait that nobody feels: enough for a source of which nothing is known
NOTHING = 0.1  # tokens a second, of a source that brings none
USUAL = 4.0  # times what loading has taken lately: then it is not usual any more


class Rates:
    """By tier a moving average of the tokens whose stored KV comes from it per second, and how many requests wait for it in
    vain right now. Threads share it. `fixed_s`: wait so long for everything, whatever is known.

    The mean is geometric, since tiers differ by powers of ten, and so does one that stalls from itself: what is slow once is
    known as slow, and three quick reads later it is quick again. Reads go on while nobody waits for them, so to try a source
    again costs no first token anything."""

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        self._logs: dict[str, float] = {}
        self._overdue: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note_load(self, tier: str, tokens: int, seconds: float) -> None:
        """Stored KV of so many tokens has come from it in this time; 0: nothing has, however soon it failed."""
        log = math.log(tokens / max(seconds, 1e-6) if tokens else NOTHING)
        with self._lock:
            self._logs[tier] = WEIGHT * log + (1 - WEIGHT) * self._logs.get(tier, log)

    def note_overdue(self, tier: str, requests: int) -> None:
        """So many more requests, or fewer, have waited for the tier in vain and still get nothing from it."""
        with self._lock:
            self._overdue[tier] += requests

    def load_tokens_per_s(self, tier: str) -> float | None:
        """None: not known."""
        with self._lock:
            log = self._logs.get(tier)
        return None if log is None else math.exp(log)

    def waits_s(
        self, tokens: Mapping[str, int], prefill_tokens_per_s: float | None, *, meanwhile: bool
    ) -> dict[str, float]:
        """How long to wait for the stored KV of so many tokens by tier; 0: go on without it. `meanwhile`: what has not been
        waited for may still come while the prompt is computed; else it is worth waiting for as long as it is the faster way."""
        total, speed = sum(tokens.values()), prefill_tokens_per_s
        return {tier: self._wait_s(tier, count, total, speed, meanwhile) for tier, count in tokens.items()}

    def _wait_s(self, tier: str, tokens: int, total: int, speed: float | None, meanwhile: bool) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        if self._overdue[tier] > 0:
            return 0.0
        if not speed:
            return FLOOR_S
        budget, rate = PATIENCE * total / speed, self.load_tokens_per_s(tier)
        if rate is None:  # where nothing comes meanwhile there is no second chance
            return min(FLOOR_S, budget) if meanwhile else budget
        load_s = tokens / rate
        if load_s > (budget if meanwhile else tokens / speed):
            return 0.0
        return min(budget, max(FLOOR_S, USUAL * load_s))
