"""Full prefill: the prompt is read again as a whole. The baseline of everything."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from serving.blend.choosing import Choosing, Placed, Probe
from serving.blend.methods.arguments import nothing

if TYPE_CHECKING:
    from precompute.reader import Reader
    from serving.blend.assembly import Assembly


@dataclass(frozen=True)
class Full(Choosing):
    uses_stored = False
    stored_labels = False

    @classmethod
    def parse(cls, argument: str) -> Full:
        nothing(argument)
        return cls()

    def choose(self, placed: Placed, probe: Probe) -> Generator[None, None, torch.Tensor]:
        yield from ()
        return placed.stored

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]:
        steering, stop, bias = assembly.steering, 0, None
        if steering is not None:  # the caller's text in pieces of its own, where it is steered and the documents are not
            stop, bias = steering.start, steering.bias
            yield from reader.prefill_pieces(assembly.kv, assembly.ids[:stop], logits=False)
        logits = yield from reader.prefill_pieces(assembly.kv, assembly.ids[stop:], stop, bias)
        assert logits is not None
        return logits
