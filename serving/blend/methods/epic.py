"""EPIC (Hu et al. 2024): the first K tokens of every chunk, where its attention sink sits, are computed again."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from serving.blend.choosing import Choosing, Placed, Probe, union
from serving.blend.methods.arguments import count


@dataclass(frozen=True)
class Epic(Choosing):
    tokens: int
    uses_stored = True
    stored_labels = False

    @classmethod
    def parse(cls, argument: str) -> Epic:
        return cls(count(argument))

    def choose(self, placed: Placed, probe: Probe) -> Generator[None, None, torch.Tensor]:
        yield from ()
        device = placed.fresh.device
        heads = [torch.arange(a, min(a + self.tokens, b), device=device) for a, b in placed.spans]
        return union(placed.stored[:0], *heads)
