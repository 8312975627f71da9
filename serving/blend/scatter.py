"""Scattered recompute: any sorted set of positions through the whole model, over an assembled KV buffer.

Key j is visible to row i if and only if pos_j <= pos_i, so that recomputing everything equals full prefill.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from precompute.attention import attend
from precompute.reader import PIECE, Reader
from serving.blend.assembly import Assembly

GROUPS, MIN_GROUP = 4, 16


class ScatterPass:
    """Rows at sorted `positions` [rows] of a buffer. K and V of the rows replace what is there before they attend.

    `watch`: number of last rows whose attention is summed over heads, rows and layers into `attention` [keys]."""

    def __init__(self, kv: torch.Tensor, positions: torch.Tensor, watch: int = 0) -> None:
        self._kv, self._positions, self._watch = kv, positions, watch
        self._keys = int(positions[-1]) + 1
        # Early rows see few keys: in groups by position, each over its own keys, half of the work falls away.
        self._groups = [
            (len(group), int(group[-1]) + 1, causal_mask(group, int(group[-1]) + 1, kv.dtype))
            for group in torch.split(positions, max(MIN_GROUP, -(-len(positions) // GROUPS)))
        ]
        self.attention = torch.zeros(self._keys, device=kv.device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        keys, values = self._kv[layer, :1, :, : self._keys], self._kv[layer, 1:, :, : self._keys]
        keys[:, :, self._positions] = k
        values[:, :, self._positions] = v
        parts, at = [], 0
        for rows, seen, mask in self._groups:
            parts.append(attend(q[:, :, at : at + rows], keys[:, :, :seen], values[:, :, :seen], scale, mask=mask))
            at += rows
        out = torch.cat([part for part, _ in parts], 2)
        if self._watch:
            lse = torch.cat([part for _, part in parts], 2)
            self._observe(q[:, :, -self._watch :], keys, lse[:, :, -self._watch :], scale)
        return out

    def _observe(self, q: torch.Tensor, keys: torch.Tensor, lse: torch.Tensor, scale: float) -> None:
        group = q.shape[1] // keys.shape[1]
        folded = q.reshape(keys.shape[1], group * q.shape[2], q.shape[3])
        logits = (folded @ keys[0].transpose(-1, -2)).float() * scale
        self.attention += torch.exp(logits - lse.reshape(keys.shape[1], -1, 1)).sum((0, 1))


def causal_mask(positions: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [rows, keys]: 0 where key position <= row position, -inf elsewhere."""
    hidden = torch.arange(keys, device=positions.device)[None] > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


def recompute(
    reader: Reader, assembly: Assembly, positions: torch.Tensor, watch: int = 0
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
    """Compute `positions` (sorted, unique, ending with the prompt's last) in pieces; yields between them.

    Returns the last row's logits [vocab] and the attention [keys] that the last `watch` rows paid. Ascending pieces are
    exact, since no row needs a later one."""
    stored = sum(int(((positions >= a) & (positions < b)).sum()) for a, b in assembly.spans)
    assembly.recomputed_token_layers += stored * reader.layers
    pieces = torch.split(positions, PIECE)
    for piece in pieces[:-1]:
        reader.forward(assembly.ids[piece], piece, ScatterPass(assembly.kv, piece), logits=False)
        yield
    last = pieces[-1]
    final = ScatterPass(assembly.kv, last, min(watch, len(last)))
    logits = reader.forward(assembly.ids[last], last, final)
    assert logits is not None
    return logits, final.attention


def union(*positions: torch.Tensor) -> torch.Tensor:
    """Sorted union of position sets."""
    merged: torch.Tensor = torch.unique(torch.cat(positions))
    return merged
