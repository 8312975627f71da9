"""What the product serves: question-aware recompute as far as the prompt's length leaves time for it. Its length is that of
what is new in it and of what was stored for another place: in a conversation the turns before it do not count.

A short prompt is fast anyway and gains most from recompute; in a long one each recomputed row costs more and the reader
waits longest, so the share tapers to the labels' first tokens and then to none. Chunks compiled behind filler passages carry
the long prompts.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from serving.blend.choosing import Choosing, Placed, Probe
from serving.blend.methods.arguments import nothing
from serving.blend.methods.question import Question
from serving.blend.methods.reuse import Reuse

SHARE = 0.25
WHOLE_UNTIL, NOTHING_FROM, ANCHORS_UNTIL = 2304, 3840, 6144  # tokens


@dataclass(frozen=True)
class Default(Choosing):
    uses_stored = True
    stored_labels = True

    @classmethod
    def parse(cls, argument: str) -> Default:
        nothing(argument)
        return cls()

    def by_question(self, tokens: int) -> bool:
        return recompute_share(tokens) > 0

    def choose(self, placed: Placed, probe: Probe) -> Generator[None, None, torch.Tensor]:
        tokens = len(placed.stored) + len(placed.fresh)  # what stands as it was costs nothing, and is not wrong
        chosen = Question(recompute_share(tokens)) if tokens <= ANCHORS_UNTIL else Reuse()
        return (yield from chosen.choose(placed, probe))


def recompute_share(tokens: int) -> float:
    """Share of the stored tokens that are computed again in a prompt of this length."""
    left = (NOTHING_FROM - tokens) / (NOTHING_FROM - WHOLE_UNTIL)
    return SHARE * min(1.0, max(0.0, left))
