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
    stored_labels = False

    @classmethod
    def parse(cls, argument: str) -> Full:
        nothing(argument)
        return cls()

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]:
        logits = None
        steering = assembly.steering
        # The caller's text in pieces of its own, where it is steered and the documents are not.
        stop = assembly.tail_start if steering else 0
        starts = [*range(0, stop, PIECE), *range(stop, assembly.tokens, PIECE)]
        for start, end in zip(starts, [*starts[1:], assembly.tokens], strict=True):
            positions = torch.arange(start, end, device=reader.device)
            bias = steering.bias if steering and start >= stop else None
            kv_pass = ContiguousPass(assembly.kv, start, bias)
            logits = reader.forward(assembly.ids[start:end], positions, kv_pass, logits=end == assembly.tokens)
            yield
        assert logits is not None
        return logits
