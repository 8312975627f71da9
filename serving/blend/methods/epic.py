"""EPIC (Hu et al. 2024): the first K tokens of every chunk, where its attention sink sits, are computed again."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from precompute.reader import Reader
from serving.blend.assembly import Assembly
from serving.blend.methods.arguments import count
from serving.blend.scatter import recompute, union


@dataclass(frozen=True)
class Epic:
    tokens: int
    uses_stored = True
    stored_labels = False

    @classmethod
    def parse(cls, argument: str) -> Epic:
        return cls(count(argument))

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]:
        heads = [torch.arange(a, min(a + self.tokens, b), device=reader.device) for a, b in assembly.spans]
        logits = yield from recompute(reader, assembly, union(assembly.fresh, *heads))
        return logits
