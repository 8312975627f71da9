"""Question-aware selection: the tokens to which the question pays most attention are computed again.

The question runs once over the assembled cache; its attention, averaged over layers, heads and question tokens, ranks the
stored tokens. Related: ProphetKV, QCFuse (2025/26), which also choose by the query.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from precompute.reader import Reader
from serving.blend.assembly import Assembly
from serving.blend.methods.arguments import ratio
from serving.blend.scatter import recompute, union


@dataclass(frozen=True)
class Question:
    share: float
    uses_stored = True

    @classmethod
    def parse(cls, argument: str) -> Question:
        return cls(ratio(argument))

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]:
        question = assembly.tokens - assembly.tail_start
        logits, attention = yield from recompute(reader, assembly, assembly.fresh, watch=question)
        stored = assembly.stored
        if not len(stored):
            return logits
        yield
        chosen = stored[attention[stored].topk(max(1, round(len(stored) * self.share))).indices]
        logits, _ = yield from recompute(reader, assembly, union(assembly.fresh, chosen))
        return logits
