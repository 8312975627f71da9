"""How fast a model reads: a moving average that a few rows do not move far."""

from __future__ import annotations

WEIGHT = 0.3  # of a whole piece in the moving average
ROWS = 512  # of a whole piece


def pace(known: float | None, rows: int, seconds: float) -> float:
    """Tokens per second after a forward pass of so many rows, `known` being the average before it (None: the first). A few rows
    take hardly less time than a piece of them, and so count by their share of one."""
    found, weight = rows / max(seconds, 1e-6), WEIGHT * min(1.0, rows / ROWS)
    return found if known is None else (1 - weight) * known + weight * found
