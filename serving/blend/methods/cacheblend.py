"""CacheBlend (Yao et al. 2024): tokens whose value vectors at layer 1 deviate most from the stored ones.

Layer 0 and the projections of layer 1 run over all tokens, the selected rows then run through all layers. Unlike the
released code, every recomputed row sees exactly the keys at or before its position.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from serving.blend.choosing import Choosing, Placed, Probe
from serving.blend.methods.arguments import ratio


@dataclass(frozen=True)
class CacheBlend(Choosing):
    share: float
    uses_stored = True
    stored_labels = False

    @classmethod
    def parse(cls, argument: str) -> CacheBlend:
        return cls(ratio(argument))

    def choose(self, placed: Placed, probe: Probe) -> Generator[None, None, torch.Tensor]:
        stored = placed.stored
        if not len(stored):
            return stored
        deviation = yield from probe.deviation()
        return stored[deviation.topk(max(1, round(len(stored) * self.share))).indices]
