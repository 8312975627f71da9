"""Eviction on paper: a seeded trace of requests replayed on the tiers' rule (GDSF) and on LRU, at several sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, cycle, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.table import Table

from bench.harness import console, write_record
from storage.tiers.eviction import GDSF, Eviction
from storage.tiers.ledger import Ledger

SHARES = (0.02, 0.05, 0.1, 0.25)  # of the bytes of all chunks that questions are about
SKEW = 0.9  # Zipf's exponent
BYTES_PER_TOKEN = (23_040, 11_520, 5_760)  # the embedded model's in bf16, in half and in a quarter of it
TOKENS = (50, 400)

Trace = Sequence[tuple[int, bool]]  # the chunk asked for, and whether the request is counted


class LRU:
    """The baseline: what was asked for longest ago goes first, whatever it costs."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def insert(self, key: str, size: int, cost: float) -> None:
        """See Eviction."""
        self._order[key] = None

    def touch(self, key: str) -> None:
        """See Eviction."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: str) -> None:
        """See Eviction."""
        self._order.pop(key, None)

    def pop(self) -> str | None:
        """See Eviction."""
        return self._order.popitem(last=False)[0] if self._order else None


RULES: Mapping[str, Callable[[], Eviction]] = MappingProxyType({"gdsf": GDSF, "lru": LRU})


def run(*, chunks: int, requests: int, seed: int = 0, out: Path | None = None) -> dict[str, Any]:
    """Replay the traces and print the table; the record is also written to `out`."""
    rows = replay(chunks, requests, seed)
    record = {"chunks": chunks, "requests": requests, "seed": seed, "skew": SKEW, "rows": rows}
    write_record(record, out)
    console().print(eviction_table(rows))
    return record


def replay(chunks: int = 2000, requests: int = 30_000, seed: int = 0) -> list[dict[str, Any]]:
    """Hit ratio, and the share of recompute cost (tokens of prefill) that was saved, by trace, size and rule.

    Traces: `zipf`, questions about `chunks` chunks; `scan`, in the middle of the questions three times as many other
    chunks are read once, and the questions after it are counted; `mix`, one read of such a scan after each
    question, and the questions are counted.
    """
    random = np.random.default_rng(seed)
    tokens = random.integers(*TOKENS, 4 * chunks, endpoint=True)
    sizes = tokens * random.choice(BYTES_PER_TOKEN, 4 * chunks)
    popularity = 1 / np.arange(1, chunks + 1) ** SKEW
    asked = random.permutation(chunks)[random.choice(chunks, requests, p=popularity / popularity.sum())].tolist()
    zipf = [(number, True) for number in asked]
    scan = [(number, False) for number in range(chunks, 4 * chunks)]
    before = [(number, False) for number in asked[: requests // 2]]
    traces: dict[str, Trace] = {
        "zipf": zipf,
        "scan": [*before, *scan, *zipf[requests // 2 :]],
        "mix": list(chain.from_iterable(zip(zipf, cycle(scan), strict=False))),
    }
    rows = []
    for (name, trace), share, rule in product(traces.items(), SHARES, RULES):
        ledger = Ledger(int(share * sizes[:chunks].sum()), RULES[rule]())
        hits, saved = _replay(trace, sizes.tolist(), tokens.tolist(), ledger)
        rows.append({"trace": name, "share": share, "rule": rule, "hit_ratio": hits, "saved_cost": saved})
    return rows


def _replay(trace: Trace, sizes: Sequence[int], costs: Sequence[int], ledger: Ledger) -> tuple[float, float]:
    """Hit ratio and saved cost of the requests that are counted."""
    asked = hits = cost = saved = 0
    for number, counted in trace:
        key = str(number)
        held = ledger.get(key) is not None
        if counted:
            asked, cost = asked + 1, cost + costs[number]
            hits, saved = hits + held, saved + held * costs[number]
        if held:
            ledger.touch(key)
        elif (entry := ledger.reserve(key, sizes[number], costs[number])) is not None:
            for victim in entry.victims:
                ledger.release(victim)
            ledger.settle(entry)
    return round(hits / asked, 4), round(saved / cost, 4)


def eviction_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Hit ratio / recompute cost saved, by tier size as a share of what is asked for")
    for column in ("trace", "size", *RULES):
        table.add_column(column)
    for start in range(0, len(rows), len(RULES)):
        group = rows[start : start + len(RULES)]
        cells = [f"{row['hit_ratio']:.3f} / {row['saved_cost']:.3f}" for row in group]
        table.add_row(group[0]["trace"], f"{group[0]['share']:.0%}", *cells)
    return table
