"""How fast vLLM's model computes the rows of our blends: what a wait for stored KV is weighed against, and how many rows are
computed between two steps of other answers."""

from __future__ import annotations

import time

import torch

from precompute.pace import pace
from serving.connector.blending import Hook, Model

SLOWER = 1.25  # so many times as long as one row a piece may take that others wait for: up to there rows cost little
TRIES = 3  # of which the quickest counts


class Timed:
    """`Model` over another one. `tokens_per_s`: a moving average over passes that went through all layers with nothing beside
    them. On a GPU the end of each is waited for, as the next piece would."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.layers = model.layers
        self.tokens_per_s: float | None = None
        self.beside = 0
        self._few = model.piece

    @property
    def piece(self) -> int:
        """See `Model`. Others wait no longer for a piece than for themselves, about; alone a prompt waits for nobody."""
        return min(self._model.piece, max(self._few, self.beside)) if self.beside else self._model.piece

    @torch.inference_mode()
    def measure(self, block: int, device: torch.device) -> None:
        """Before anything is in the pages, on every rank: else the first prompts would not be waited for as they deserve. The
        first pass warms kernels."""
        most, table = min(self._model.piece, 2 * block), torch.tensor([1, 2], device=device)

        def seconds(rows: int) -> float:
            positions = torch.arange(rows, device=device)
            self.tokens_per_s, begun = None, time.perf_counter()
            self.run(torch.zeros_like(positions), positions, table)
            return time.perf_counter() - begun

        def all_ranks(rows: int) -> float:
            return float(self.sum_ranks(torch.tensor(min(seconds(rows) for _ in range(TRIES)), device=device)))

        seconds(most)
        one, self._few = all_ranks(1), 1
        while 2 * self._few <= most and all_ranks(2 * self._few) <= SLOWER * one:
            self._few *= 2
        seconds(most)

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, before: Hook | None = None,
        after: Hook | None = None,
    ) -> None:  # fmt: skip
        """See `Model`."""
        begun = time.perf_counter()
        self._model.run(ids, positions, table, before, after)
        if before is None and after is None and not self.beside:
            if ids.is_cuda:
                torch.cuda.synchronize(ids.device)
            self.tokens_per_s = pace(self.tokens_per_s, len(ids), time.perf_counter() - begun)

    def sum_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._model.sum_ranks(values)
