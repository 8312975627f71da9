"""Attention over a KV buffer that we own, plugged into any Hugging Face decoder.

The model's own code runs everything but attention. Its attention layers call `_attention`, which hands the freshly
rotated q, k, v to the `KVLayers` of the running pass (keyword argument `kv_pass`). No HF cache object is used.
Shapes: q [1, heads, rows, head_dim]; k and v [1, kv_heads, rows, head_dim]; results are [1, heads, rows, head_dim].
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

NAME = "preread"


class KVPass(Protocol):
    """One forward pass: receives each layer's q, k, v and answers with the attention's result."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor: ...


def register() -> None:
    """Make `attn_implementation="preread"` known to transformers, which then builds no mask. Safe to call again."""
    AttentionInterface.register(NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    kv_pass: KVPass,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = kv_pass.attend(int(module.layer_idx), query, key, value, scale)  # type: ignore[arg-type]
    return out.transpose(1, 2), None


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool = False, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention and its log-sum-exp [1, heads, rows] (fp32).

    `causal`: row i sees key j <= i (rows and keys are the same tokens). `mask`: additive, in q's dtype, [group * rows,
    keys] with the rows repeated for each of the `group` query heads of a KV head: grouped heads are folded into rows, so
    that K and V are never repeated, except in the causal case."""
    heads, kv_heads, rows = q.shape[1], k.shape[1], q.shape[2]
    group = heads // kv_heads
    if group == 1 or causal:
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return _kernel(q, k, v, scale, causal, None if mask is None else mask[None, None])
    folded = q.reshape(1, kv_heads, group * rows, q.shape[3])
    out, lse = _kernel(folded, k, v, scale, False, None if mask is None else mask[None, None])
    return out.reshape(q.shape), lse.reshape(1, heads, rows)


def merge(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the result over each (flash attention's reduction)."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    weight = torch.exp(lse_b - lse)[..., None]
    return torch.lerp(out_a.float(), out_b.float(), weight).to(out_a.dtype), lse


def _kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse
    if mask is None and q.dtype != torch.float32:  # CUDA; not run where no GPU was at hand
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return result[0], result[1][..., : q.shape[2]]
    return _by_definition(q, k, v, scale, causal, mask)


def _by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    return (torch.exp(scores - lse[..., None]).to(v.dtype) @ v), lse
