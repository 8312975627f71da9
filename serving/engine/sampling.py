"""Choosing the next token."""

from __future__ import annotations

import torch


class Sampler:
    """Greedy at temperature 0, else nucleus sampling (Holtzman et al. 2020). Equal seeds give equal tokens."""

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._random = torch.Generator()
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)

    def choose(self, logits: torch.Tensor) -> int:
        """logits [vocab] fp32."""
        if self._temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.cpu() / self._temperature, -1)
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered
        ordered = ordered.masked_fill(before >= self._top_p, 0.0)
        ordered[0] = ordered[0].clamp_min(torch.finfo(torch.float32).tiny)  # top_p 0 still leaves the best one
        return int(tokens[torch.multinomial(ordered, 1, generator=self._random)])
