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


class PassDone(Exception):
    """Ends a forward pass early, when it has shown what it was run for; not an error."""


class ScatterPass:
    """Rows at sorted `positions` [rows] of a buffer. K and V of the rows replace what is there before they attend."""

    def __init__(self, kv: torch.Tensor, positions: torch.Tensor) -> None:
        self._kv, self._positions = kv, positions
        self._keys = int(positions[-1]) + 1
        # Early rows see few keys: in groups by position, each over its own keys, half of the work falls away.
        self._groups = [
            (len(group), int(group[-1]) + 1, causal_mask(group, int(group[-1]) + 1, kv.dtype))
            for group in torch.split(positions, max(MIN_GROUP, -(-len(positions) // GROUPS)))
        ]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self._attend(layer, q, k, v, scale)[0]

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result and its log-sum-exp [1, heads, rows]."""
        keys, values = self._kv[layer, :1, :, : self._keys], self._kv[layer, 1:, :, : self._keys]
        keys[:, :, self._positions] = k
        values[:, :, self._positions] = v
        parts, at = [], 0
        for rows, seen, mask in self._groups:
            parts.append(attend(q[:, :, at : at + rows], keys[:, :, :seen], values[:, :, :seen], scale, mask=mask))
            at += rows
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def causal_mask(positions: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [rows, keys]: 0 where key position <= row position, -inf elsewhere."""
    hidden = torch.arange(keys, device=positions.device)[None] > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


def recompute(reader: Reader, assembly: Assembly, positions: torch.Tensor) -> Generator[None, None, torch.Tensor]:
    """Compute `positions` (sorted, unique, ending with the prompt's last) in pieces; yields between them.

    Returns the last row's logits [vocab]. Ascending pieces are exact, since no row needs a later one."""
    stored = sum(int(((positions >= a) & (positions < b)).sum()) for a, b in assembly.spans)
    assembly.recomputed_token_layers += stored * reader.layers
    left = len(positions)
    logits = None
    for piece in torch.split(positions, PIECE):
        left -= len(piece)
        logits = reader.forward(assembly.ids[piece], piece, ScatterPass(assembly.kv, piece), logits=not left)
        if left:
            yield
    assert logits is not None
    return logits


def union(*positions: torch.Tensor) -> torch.Tensor:
    """Sorted union of position sets."""
    merged: torch.Tensor = torch.unique(torch.cat(positions))
    return merged


class WatchPass(ScatterPass):
    """Sums the attention that the last `watch` rows pay in layers [first, last) over heads and rows, then ends the pass.

    `attention` [keys]. K and V above `last` are not written: the rows are to be computed again."""

    def __init__(self, kv: torch.Tensor, positions: torch.Tensor, watch: int, first: int, last: int) -> None:
        super().__init__(kv, positions)
        self._watch, self._first, self._last = watch, first, last
        self.attention = torch.zeros(self._keys, device=kv.device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out, lse = self._attend(layer, q, k, v, scale)
        if self._watch and layer >= self._first:
            self._observe(layer, q[:, :, -self._watch :], lse[:, :, -self._watch :], scale)
        if layer + 1 >= self._last:
            raise PassDone
        return out

    def _observe(self, layer: int, q: torch.Tensor, lse: torch.Tensor, scale: float) -> None:
        keys = self._kv[layer, 0, :, : self._keys]
        folded = q.reshape(keys.shape[0], -1, q.shape[3])
        logits = (folded @ keys.transpose(-1, -2)).float() * scale
        self.attention += torch.exp(logits - lse.reshape(keys.shape[0], -1, 1)).sum((0, 1))


def question_attention(
    reader: Reader, assembly: Assembly, rows: int, first: int, last: int
) -> Generator[None, None, torch.Tensor]:
    """Attention [keys] of the prompt's last `rows` tokens in layers [first, last); yields between pieces."""
    attention = torch.zeros(assembly.tokens, device=reader.device)
    left = len(assembly.fresh)
    for piece in torch.split(assembly.fresh, PIECE):
        left -= len(piece)
        watched = max(0, min(rows - left, len(piece)))  # the question may lie in several pieces
        run = WatchPass(assembly.kv, piece, watched, first, last)
        try:
            reader.forward(assembly.ids[piece], piece, run, logits=False)
        except PassDone:
            attention[: len(run.attention)] += run.attention
        yield
    return attention
