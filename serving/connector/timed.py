"""How fast vLLM's model computes the rows of our blends: what a wait for stored KV is weighed against, and how much of a blend
is computed between two steps of other answers."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Protocol

import torch

from precompute.pace import pace
from serving.connector.blending import Hook

SHARE = 0.35  # of a step of other answers: so much later the next one may come for a blend
SLOWER = 1.25  # than a row's pass may be one that has to be whole
TRIES, FEW = 3, 32  # of which the quickest counts; more rows than that are timed once
CONTEXT = 4096  # tokens that are seen by the rows that are timed
WATCHED = 2  # so many times as long a pass takes whose layers are looked at


class Pass(Protocol):
    """A forward pass."""

    @property
    def left(self) -> int:
        """Layers still to be computed."""
        ...

    def advance(self, count: int) -> None:
        """Compute so many of them."""
        ...


class SlicedModel(Protocol):
    """vLLM's model on this rank. `piece`: rows of one pass at most; `tokens`: of a prompt at most."""

    layers: int
    piece: int
    tokens: int

    @property
    def sliced(self) -> bool:
        """Whether its passes may stop between layers."""
        ...

    def open(
        self, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, before: Hook | None, after: Hook | None
    ) -> Pass:
        """A pass of which nothing is computed yet; see `Model.run`."""
        ...

    def sum_ranks(self, values: torch.Tensor) -> torch.Tensor: ...


class Timed:
    """`Model` over vLLM's. `tokens_per_s`: a moving average over passes that went through all layers with nothing beside them
    (on a GPU the end of each is waited for, as the next piece would). `beside`, `step_s`: see `Orders`."""

    def __init__(self, model: SlicedModel) -> None:
        self._model = model
        self.layers = model.layers
        self.tokens_per_s: float | None = None
        self.beside = 0
        self.step_s: float | None = None
        self._costs: dict[int, float] = {}  # seconds of a whole pass, by its rows: the same on all ranks

    @property
    def piece(self) -> int:
        """See `Model`. Beside others as many rows as one layer computes in the time that there is, or where layers cannot be
        parted as cost about what one row does; alone none waits."""
        if not (self.beside and self._costs):
            return self._model.piece
        most = self.layers * self._time() if self._model.sliced else max(self._time(), SLOWER * self._costs[1])
        return max((rows for rows, seconds in self._costs.items() if seconds <= most), default=1)

    def _time(self) -> float:
        """Seconds for a blend, in this step."""
        return SHARE * max(self.step_s or self._costs[1], self._cost(self.beside))

    def _cost(self, rows: int) -> float:
        return next((seconds for most, seconds in self._costs.items() if most >= rows), max(self._costs.values()))

    @torch.inference_mode()
    def measure(self, block: int, device: torch.device) -> None:
        """Before anything is in the pages, on every rank: else the first prompts would not be waited for as they deserve. The
        first pass warms kernels."""
        seen = min(CONTEXT, self._model.tokens)
        table = 1 + torch.arange(-(-seen // block), device=device) % 2  # two blocks again and again

        def seconds(rows: int) -> float:
            positions = torch.arange(seen - rows, seen, device=device)
            self.tokens_per_s, begun = None, time.perf_counter()
            for _ in self.run(torch.zeros_like(positions), positions, table):
                pass
            return time.perf_counter() - begun

        most, costs, rows = min(self._model.piece, seen), dict[int, float](), 1
        seconds(most)
        while rows <= most and not (costs and costs[rows // 2] > self.layers * costs[1]):  # more are never computed at once
            quickest = min(seconds(rows) for _ in range(TRIES if rows <= FEW else 1))
            costs[rows] = float(self.sum_ranks(torch.tensor(quickest, device=device)))
            rows *= 2
        seconds(most)
        self._costs = costs

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, before: Hook | None = None,
        after: Hook | None = None,
    ) -> Generator[None, None, None]:  # fmt: skip
        """See `Model`."""
        watched = before is not None or after is not None
        work, begun, alone = self._model.open(ids, positions, table, before, after), time.perf_counter(), not watched
        while work.left:
            alone = alone and not self.beside
            work.advance(self._layers(len(ids), watched=watched))
            if work.left:
                yield
        if alone:
            if ids.is_cuda:
                torch.cuda.synchronize(ids.device)
            self.tokens_per_s = pace(self.tokens_per_s, len(ids), time.perf_counter() - begun)

    def _layers(self, rows: int, *, watched: bool) -> int:
        """How many are computed in this step."""
        if not (self.beside and self._costs):
            return self.layers
        each = self._cost(rows) / self.layers * (WATCHED if watched else 1)
        return max(1, int(self._time() / each))

    def sum_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._model.sum_ranks(values)
