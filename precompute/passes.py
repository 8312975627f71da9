"""Forward passes over KV that we own. See `attention.KVPass`; a KV buffer is [layers, 2, kv_heads, capacity, head_dim]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from precompute.attention import attend, merge


class ContiguousPass:
    """Rows are the positions [start, start + rows) of a buffer that is filled before them: prefill pieces and decoding.

    `bias` [capacity], in the buffer's dtype: added to the attention logits of the keys before `start`."""

    def __init__(self, kv: torch.Tensor, start: int, bias: torch.Tensor | None = None) -> None:
        self._kv, self._start, self._bias = kv, start, bias

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        start, end = self._start, self._start + q.shape[2]
        keys, values = self._kv[layer, :1], self._kv[layer, 1:]
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        if q.shape[2] == 1:
            return attend(q, keys[:, :, :end], values[:, :, :end], scale, mask=key_bias(self._bias, q, keys, end))[0]
        own = attend(q, k, v, scale, causal=True)
        if start == 0:
            return own[0]
        mask = key_bias(self._bias, q, keys, start)
        return merge(attend(q, keys[:, :, :start], values[:, :, :start], scale, mask=mask), own)[0]


def key_bias(bias: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, keys: int) -> torch.Tensor | None:
    """The first `keys` entries of a bias as an additive mask for `attend`."""
    if bias is None:
        return None
    return bias[:keys].expand(q.shape[1] // k.shape[1] * q.shape[2], keys)


class PackedPass:
    """Several chunks side by side in one row, each seeing a shared prefix and itself only. Keeps their K and V.

    The prefix is attended by all rows in one call, so nothing of it is copied or masked per chunk."""

    def __init__(
        self, prefix: torch.Tensor, lengths: Sequence[int], check: Callable[[], None] = lambda: None
    ) -> None:
        """`check` is called at each layer, and raises if the pass is to go no further."""
        self._prefix, self._lengths, self._check = prefix, list(lengths), check
        self.kept: list[torch.Tensor] = []  # per layer [2, kv_heads, rows, head_dim], K at its compile position

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self._check()
        self.kept.append(torch.cat((k, v)))
        sizes = self._lengths
        parts = zip(*(torch.split(x, sizes, 2) for x in (q, k, v)), strict=True)
        each = [attend(qi.contiguous(), ki, vi, scale, causal=True) for qi, ki, vi in parts]
        own = torch.cat([out for out, _ in each], 2), torch.cat([lse for _, lse in each], 2)
        if self._prefix.shape[3] == 0:
            return own[0]
        return merge(attend(q, self._prefix[layer, :1], self._prefix[layer, 1:], scale), own)[0]
