"""What a search is asked, and how long its stages take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from retrieval.rules import Rules
from storage.errors import UserError
from storage.tracing import span

Mode = Literal["hybrid", "dense", "lexical"]
MOST_RESULTS = 500


@dataclass
class Stages:
    """Milliseconds by stage of a search: embed, rules, dense, lexical, rows, confirm. `lexical` may run beside `embed` and
    `dense`: `clock` may be `time.thread_time`."""

    ms: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        begun = self.clock()
        with span(f"retrieval.{name}"):
            yield
        self.ms[name] = self.ms.get(name, 0.0) + 1000 * (self.clock() - begun)


@dataclass(frozen=True)
class Ask:
    """One search, checked."""

    rules: Rules
    query: str
    mode: Mode
    top_k: int
    token_budget: int | None
    score_threshold: float | None
    stages: Stages
    neighbours: bool
    as_of: float | None = None  # see retrieval.versions
    rerank: bool = True


def check(query: str, top_k: int, token_budget: int | None, mode: str) -> None:
    if not query.strip():
        raise UserError("The query is empty.")
    if not 1 <= top_k <= MOST_RESULTS:
        raise UserError(f"A search returns 1 to {MOST_RESULTS} chunks; {top_k} were asked for.")
    if token_budget is not None and token_budget < 1:
        raise UserError("A token budget is at least 1.")
    if mode not in ("hybrid", "dense", "lexical"):
        raise UserError(f"A search's mode is hybrid, dense or lexical; not {mode!r}.")
