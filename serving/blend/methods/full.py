"""Full prefill: the prompt is read again as a whole. The baseline of everything."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from precompute.passes import ContiguousPass
from precompute.reader import PIECE, Reader
from serving.blend.assembly import Assembly
from serving.blend.methods.arguments import nothing


@dataclass(frozen=True)
class Full:
    uses_stored = False

    @classmethod
    def parse(cls, argument: str) -> Full:
        nothing(argument)
        return cls()

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]:
        logits = None
        for start in range(0, assembly.tokens, PIECE):
            ids = assembly.ids[start : start + PIECE]
            positions = torch.arange(start, start + len(ids), device=reader.device)
            last = start + PIECE >= assembly.tokens
            logits = reader.forward(ids, positions, ContiguousPass(assembly.kv, start), logits=last)
            yield
        assert logits is not None
        return logits
