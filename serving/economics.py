"""What reuse saves and what it costs. The formulae are explained in docs/economics.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.policy.rules import Rates

GB = 1e9
HOUR = 3600.0


@dataclass(frozen=True)
class Balance:
    """None: not known, because no prefill speed is given and none has been measured yet."""

    gpu_seconds_saved: float | None
    gpu_seconds_spent: float
    money_saved: float | None
    money_spent: float

    def shown(self, rates: Rates) -> dict[str, float | str | None]:
        return {
            "gpu_seconds_saved": _rounded(self.gpu_seconds_saved),
            "gpu_seconds_spent": _rounded(self.gpu_seconds_spent),
            "money_saved": _rounded(self.money_saved),
            "money_spent": _rounded(self.money_spent),
            "currency": rates.currency or None,
        }


def balance(counts: Mapping[str, float], rates: Rates, measured_speed: float | None) -> Balance:
    """Of the counters of `usage_day`. Tokens that were recomputed are not saved; what was computed to be stored, and what
    was fetched, is spent. Holding it is priced by `month_cost`."""
    speed = rates.prefill_tokens_per_s or measured_speed
    saved = counts["tokens_reused"] / speed if speed else (0.0 if not counts["tokens_reused"] else None)
    spent = counts["seconds_compiled"]
    fetched = counts["bytes_fetched"] / GB * rates.gb_transferred
    return Balance(
        gpu_seconds_saved=saved,
        gpu_seconds_spent=spent,
        money_saved=None if saved is None else saved / HOUR * rates.gpu_hour,
        money_spent=spent / HOUR * rates.gpu_hour + fetched,
    )


def month_cost(bytes_by_tier: Mapping[str, float], rates: Rates) -> float:
    """Of holding these bytes for 30 days; a tier without a price costs nothing."""
    return sum(size / GB * rates.gb_month.get(tier, 0.0) for tier, size in bytes_by_tier.items())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
