"""Whose turn it is: requests in the engine, in the order they came.

First tokens come one after another, not all at the end: a prefill goes on until it is done, while answers that have begun
get one token each in between. A shorter prompt may overtake a longer one that has not begun to answer, but only for a
share of the longer one's own work: by no more than that is a first token later than if requests were served one by one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from precompute.reader import PIECE

if TYPE_CHECKING:
    from serving.engine.torch_engine import TorchGeneration

PATIENCE = 0.25  # share of a request's own rows for which later ones may go before it


@dataclass(eq=False)
class Running:
    """A request that has its stored KV. `rows`: prompt tokens to be computed, as far as is known before they are. `piece`:
    how many at most are computed in one turn."""

    generation: TorchGeneration
    work: Generator[None, None, None]
    rows: int
    piece: int = PIECE
    patience: float = field(init=False)

    def __post_init__(self) -> None:
        self.patience = PATIENCE * self.rows

    @property
    def answers(self) -> bool:
        """Its first token is there."""
        return "first_token" in self.generation.report.ms


class Turns:
    """The running requests. One thread uses it."""

    def __init__(self) -> None:
        self._running: list[Running] = []  # in order of arrival

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Running]:
        return iter(list(self._running))

    def add(self, request: Running) -> None:
        self._running.append(request)

    def remove(self, request: Running) -> None:
        self._running.remove(request)

    def round(self) -> Iterator[Running]:
        """One turn for every request that answers, and one for the prefill whose turn it is."""
        yield from [request for request in self._running if request.answers]
        waiting = [request for request in self._running if not request.answers]
        if waiting:
            yield self._prefill(waiting)

    def _prefill(self, waiting: list[Running]) -> Running:
        chosen = min(waiting, key=lambda request: request.rows)  # of equals the first
        before = waiting[: waiting.index(chosen)]
        for request in before:
            if request.patience <= 0:
                return self._piece(request)
        for request in before:
            request.patience -= chosen.piece
        return self._piece(chosen)

    @staticmethod
    def _piece(request: Running) -> Running:
        request.rows = max(1, request.rows - PIECE)
        return request
