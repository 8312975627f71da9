"""How fast vLLM's model computes the rows of our blends: what a wait for stored KV is weighed against."""

from __future__ import annotations

import time

import torch

from precompute.pace import pace
from serving.connector.blending import Hook, Model


class Timed:
    """`Model` over another one. `tokens_per_s`: a moving average over the passes that went through all layers. On a GPU the
    end of each is waited for, as the next piece would."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.layers, self.piece = model.layers, model.piece
        self.tokens_per_s: float | None = None

    @torch.inference_mode()
    def measure(self, block: int, device: torch.device) -> None:
        """Before anything is in the pages, on every rank: else the first prompts would not be waited for as they deserve. The
        first pass warms kernels."""
        positions = torch.arange(min(self.piece, 2 * block), device=device)
        for _ in range(2):
            self.tokens_per_s = None
            self.run(torch.zeros_like(positions), positions, torch.tensor([1, 2], device=device))

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, before: Hook | None = None,
        after: Hook | None = None,
    ) -> None:  # fmt: skip
        """See `Model`."""
        begun = time.perf_counter()
        self._model.run(ids, positions, table, before, after)
        if before is None and after is None:
            if ids.is_cuda:
                torch.cuda.synchronize(ids.device)
            self.tokens_per_s = pace(self.tokens_per_s, len(ids), time.perf_counter() - begun)

    def sum_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._model.sum_ranks(values)
