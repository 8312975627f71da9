"""Full prefill: the prompt is read again as a whole. The baseline of everything."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from precompute.reader import Reader
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
        steering, stop, bias = assembly.steering, 0, None
        if steering is not None:  # the caller's text in pieces of its own, where it is steered and the documents are not
            stop, bias = steering.start, steering.bias
            yield from reader.prefill_pieces(assembly.kv, assembly.ids[:stop], logits=False)
        logits = yield from reader.prefill_pieces(assembly.kv, assembly.ids[stop:], stop, bias)
        assert logits is not None
        return logits
