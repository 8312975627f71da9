"""CacheBlend (Yao et al. 2024): tokens whose value vectors at layer 1 deviate most from the stored ones.

Layer 0 and the projections of layer 1 run over all tokens, the selected rows then run through all layers. Unlike the
released code, every recomputed row sees exactly the keys at or before its position.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from precompute.reader import Reader
from serving.blend.assembly import Assembly
from serving.blend.methods.arguments import ratio
from serving.blend.scatter import PassDone, ScatterPass, recompute, union

PROBE_LAYER = 1


class _DeviationPass(ScatterPass):
    """Runs the layers below the probe layer exactly and measures there, then ends the pass."""

    deviation: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        if layer < PROBE_LAYER:
            return super().attend(layer, q, k, v, scale)
        stored = self._kv[layer, 1][:, self._positions].float()
        self.deviation = (v[0].float() - stored).square().sum((0, 2))
        raise PassDone


@dataclass(frozen=True)
class CacheBlend:
    share: float
    uses_stored = True
    stored_labels = False

    @classmethod
    def parse(cls, argument: str) -> CacheBlend:
        return cls(ratio(argument))

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]:
        stored = assembly.stored
        rows = union(assembly.fresh, stored)
        probe = _DeviationPass(assembly.kv, rows, reader.query_heads)
        try:
            reader.forward(assembly.ids[rows], rows, probe, logits=False)
        except PassDone:
            pass
        yield
        assembly.recomputed_token_layers += len(stored) * PROBE_LAYER
        deviation = probe.deviation[torch.isin(rows, stored)]
        chosen = stored[deviation.topk(max(1, round(len(stored) * self.share))).indices] if len(stored) else stored
        logits = yield from recompute(reader, assembly, union(assembly.fresh, chosen))
        return logits
