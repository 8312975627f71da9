"""Question-aware selection: the tokens to which the question pays most attention are computed again.

The question first runs over the assembled cache, through the layers that tell best what it looks at; its attention there,
summed over heads and question tokens, ranks the stored tokens. Always among them are the first token of every label, which
reads all that stands before its passage; some tokens right behind the frame, where chunks are not at home that were compiled
behind filler passages; and the retriever's first choice, where it is known: it knows more than attention does. Related:
ProphetKV and QCFuse (2025/26), which also choose by the query. The layers were chosen on the embedded model; see
BENCHMARKS.md.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from precompute.reader import Reader
from serving.blend.assembly import Assembly
from serving.blend.methods.arguments import ratio
from serving.blend.scatter import question_attention, recompute, union

WATCHED = (0.53, 0.8)  # from, to: of the model's depth
LEAD, BEST = 0.1, 0.6  # of the budget: for the tokens right behind the frame; at most for the retriever's first choice


@dataclass(frozen=True)
class Question:
    """`share` of the stored tokens; at 0 the anchors alone."""

    share: float
    uses_stored = True
    stored_labels = True

    @classmethod
    def parse(cls, argument: str) -> Question:
        return cls(ratio(argument))

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]:
        stored = assembly.stored
        budget = round(len(stored) * self.share)
        chosen = union(assembly.anchors, stored[: int(LEAD * budget)], assembly.best[: int(BEST * budget)])
        if budget > len(chosen):
            first = int(WATCHED[0] * reader.layers)
            last = max(first + 1, round(WATCHED[1] * reader.layers))
            question = assembly.tokens - assembly.tail_start
            attention = yield from question_attention(reader, assembly, question, first, last)
            attention[chosen] = -1.0
            most = stored[attention[stored].topk(budget - len(chosen)).indices]
            chosen = union(chosen, most)
        logits = yield from recompute(reader, assembly, union(assembly.fresh, chosen))
        return logits
