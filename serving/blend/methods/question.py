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

from serving.blend.choosing import Choosing, Placed, Probe, union
from serving.blend.methods.arguments import ratio

WATCHED = (0.53, 0.8)  # from, to: of the model's depth
LEAD, BEST = 0.1, 0.6  # of the budget: for the tokens right behind the frame; at most for the retriever's first choice


@dataclass(frozen=True)
class Question(Choosing):
    """`share` of the stored tokens; at 0 the anchors alone."""

    share: float
    uses_stored = True
    stored_labels = True

    @classmethod
    def parse(cls, argument: str) -> Question:
        return cls(ratio(argument))

    def by_question(self, tokens: int) -> bool:
        return self.share > 0

    def choose(self, placed: Placed, probe: Probe) -> Generator[None, None, torch.Tensor]:
        stored = placed.stored
        budget = round(len(stored) * self.share)
        chosen = union(placed.anchors, stored[: int(LEAD * budget)], placed.best[: int(BEST * budget)])
        left = budget - len(chosen)
        if left > 0 and placed.plain and WATCHED[1] * len(placed.fresh) > budget:
            # Much is new, and the question would cost more than what it chooses. Where a text begins it has changed most.
            chosen = union(chosen, _first(placed, chosen, left))
        elif left > 0:
            first = int(WATCHED[0] * probe.layers)
            last = max(first + 1, round(WATCHED[1] * probe.layers))
            question = int((placed.fresh >= placed.tail_start).sum())
            attention = yield from probe.question_attention(question, first, last)
            attention[chosen] = -1.0
            chosen = union(chosen, stored[attention[stored].topk(left).indices])
        return chosen


def _first(placed: Placed, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """Of the stored tokens that are not chosen yet those nearest to the starts of their spans."""
    starts = torch.cat([torch.arange(b - a, device=placed.fresh.device) for a, b in placed.spans])
    order = placed.stored[starts.argsort(stable=True)]
    return order[~torch.isin(order, chosen)][:count]
