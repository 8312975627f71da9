"""Scattered recompute: any sorted set of positions through the whole model, over an assembled KV buffer.

Key j is visible to row i if and only if pos_j <= pos_i, so that recomputing everything equals full prefill.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from precompute.attention import attend, merge
from precompute.passes import key_bias
from precompute.reader import PIECE, Reader
from serving.blend.assembly import Assembly, Steering
from serving.blend.choosing import union

GROUPS, MIN_GROUP = 3, 24
PROBE_LAYER = 1  # whose value vectors tell how much a token deviates


class PassDone(Exception):
    """Ends a forward pass early, when it has shown what it was run for; not an error."""


class ScatterPass:
    """Rows at sorted `positions` [rows] of a buffer. K and V of the rows replace what is there before they attend.

    The contiguous run at the end (the question) sees all keys before it without a mask. The rows before it go in groups
    by position, each over its own keys: early rows see few, so that half of the work falls away.
    `steering`: see `Assembly.steering`; then the run is the caller's text and nothing else, and steered."""

    def __init__(
        self, kv: torch.Tensor, positions: torch.Tensor, query_heads: int, steering: Steering | None = None
    ) -> None:
        self._kv, self._positions, self._bias = kv, positions, None
        self._keys = int(positions[-1]) + 1
        run = _last_run(positions)
        if steering is not None:
            self._bias = steering.bias
            run = max(0, min(run, self._keys - steering.start))
        self._run_start, scattered = self._keys - run, positions[: len(positions) - run]
        fold = query_heads // kv.shape[2]
        groups = torch.split(scattered, max(MIN_GROUP, -(-len(scattered) // GROUPS))) if len(scattered) else ()
        self._groups = [
            (len(group), int(group[-1]) + 1, causal_mask(group, int(group[-1]) + 1, kv.dtype).repeat(fold, 1))
            for group in groups
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
        if at < q.shape[2]:
            parts.append(self._attend_run(q[:, :, at:], k[:, :, at:], v[:, :, at:], keys, values, scale))
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)

    def _attend_run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = attend(q, k, v, scale, causal=True)
        if self._run_start == 0:
            return own
        start = self._run_start
        mask = key_bias(self._bias, q, keys, start)
        return merge(attend(q, keys[:, :, :start], values[:, :, :start], scale, mask=mask), own)


def _last_run(positions: torch.Tensor) -> int:
    """Length of the contiguous run at the end of sorted positions."""
    gaps = (positions[1:] - positions[:-1] != 1).nonzero()
    return len(positions) - (int(gaps[-1]) + 1 if len(gaps) else 0)


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
        kv_pass = ScatterPass(assembly.kv, piece, reader.query_heads, assembly.steering)
        logits = reader.forward(assembly.ids[piece], piece, kv_pass, logits=not left)
        if left:
            yield
    assert logits is not None
    return logits


class WatchPass(ScatterPass):
    """Sums the attention that the last `watch` rows pay in layers [first, last) over heads and rows, then ends the pass.

    `attention` [keys]. K and V above `last` are not written: the rows are to be computed again."""

    def __init__(
        self, kv: torch.Tensor, positions: torch.Tensor, query_heads: int, watch: int, first: int, last: int
    ) -> None:
        super().__init__(kv, positions, query_heads)
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


class DeviationPass(ScatterPass):
    """Runs the layers below the probe layer exactly and measures there, then ends the pass."""

    deviation: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        if layer < PROBE_LAYER:
            return super().attend(layer, q, k, v, scale)
        stored = self._kv[layer, 1][:, self._positions].float()
        self.deviation = (v[0].float() - stored).square().sum((0, 2))
        raise PassDone


class ReaderProbe:
    """`Probe` over a reader's own buffer."""

    def __init__(self, reader: Reader, assembly: Assembly) -> None:
        self._reader, self._assembly = reader, assembly
        self.layers = reader.layers

    def question_attention(self, rows: int, first: int, last: int) -> Generator[None, None, torch.Tensor]:
        """See `Probe`."""
        reader, assembly = self._reader, self._assembly
        attention = torch.zeros(assembly.tokens, device=reader.device)
        left = len(assembly.fresh)
        for piece in torch.split(assembly.fresh, PIECE):
            left -= len(piece)
            watched = max(0, min(rows - left, len(piece)))  # the question may lie in several pieces
            run = WatchPass(assembly.kv, piece, reader.query_heads, watched, first, last)
            try:
                reader.forward(assembly.ids[piece], piece, run, logits=False)
            except PassDone:
                attention[: len(run.attention)] += run.attention
            yield
        return attention

    def deviation(self) -> Generator[None, None, torch.Tensor]:
        """See `Probe`."""
        reader, assembly = self._reader, self._assembly
        stored = assembly.stored
        rows = union(assembly.fresh, stored)
        probe = DeviationPass(assembly.kv, rows, reader.query_heads)
        try:
            reader.forward(assembly.ids[rows], rows, probe, logits=False)
        except PassDone:
            pass
        yield
        assembly.recomputed_token_layers += len(stored) * PROBE_LAYER
        return probe.deviation[torch.isin(rows, stored)]
