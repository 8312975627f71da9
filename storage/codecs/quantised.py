"""Uniform quantisation: K by channel, V by token, as in KIVI (Liu et al., 2024), without calibration.

K keeps the same few channels large for all tokens, so a channel of a chunk has one offset and step; V has no such
channels, so a token has one step and is symmetric about zero. Section: K's offsets and steps, bf16 [kv_heads, head_dim]
each; V's steps, bf16 [kv_heads, tokens]; K's integers, then V's, each packed as `packing` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from storage.codecs.packing import pack, packed_length, spans, unpack

LARGEST = 1e38  # beyond it a step times its integers could leave the range of fp32
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Quantised:
    """`bits` for an element of K and of V alike. With e = 2**-8 (bf16), 2**-11 (fp16) or 2**-22 (fp32):

    |K' - K| <= step / 2 + e * |max K| in the channel, step <= 1.02 * (max - min + |min| / 64) / (2**bits - 1)
    |V' - V| <= step / 2 + e * |max V| of the token, step <= 1.02 * max |V| / (2**(bits - 1) - 1)

    and below the dtype's normal numbers half of its smallest one more, by the last rounding (2**-25 in fp16).
    Raises ValueError for NaN, infinities and numbers beyond 1e38: no model's KV holds them."""

    name: str
    bits: int

    def encode(self, layer: torch.Tensor, number: int = 0) -> memoryview:
        """See Codec."""
        x = layer.float()
        if not bool((x.abs() <= LARGEST).all()):  # NaN compares false
            raise ValueError("the KV holds numbers that cannot be quantised")
        k, v = x
        offset = _bf16(k.amin(1), up=False)
        step = _bf16(((k.amax(1) - offset.float()) / self.top).clamp_min(_SMALLEST), up=True)
        scale = _bf16((v.abs().amax(2) / self.middle).clamp_min(_SMALLEST), up=True)
        k_ints = ((k - offset.float()[:, None]) / step.float()[:, None]).round().clamp(0, self.top)
        v_ints = (v / scale.float()[..., None]).round() + self.middle
        head = torch.cat([part.reshape(-1) for part in (offset, step, scale)]).view(torch.uint8).numpy()
        packed = [pack(ints.to(torch.uint8).reshape(-1).numpy(), self.bits) for ints in (k_ints, v_ints)]
        return np.concatenate([head, *packed]).data

    def decode(
        self,
        sections: Sequence[torch.Tensor],
        dtype: torch.dtype,
        layer_shape: tuple[int, int, int, int],
        first: int = 0,
    ) -> torch.Tensor:
        """See Codec. In fp32, rounded once; as many layers at a time as the processor's cache holds."""
        _, heads, tokens, width = layer_shape
        count, steps = heads * tokens * width, 2 * (2 * heads * width + heads * tokens)
        if any(section.numel() != steps + 2 * packed_length(count, self.bits) for section in sections):
            raise ValueError("a section is not as long as its layer")
        out = torch.empty((len(sections), *layer_shape), dtype=dtype)
        for span in spans(len(sections), count):
            self._read(torch.stack(list(sections[span])), steps, out[span])
        return out

    def _read(self, data: torch.Tensor, head: int, out: torch.Tensor) -> None:
        """Fills `out` [layers, *layer_shape] from sections [layers, bytes], whose first `head` bytes are steps."""
        layers, _, heads, tokens, width = out.shape
        channels = heads * width
        # Cloned: an odd number of bytes in a section would leave bf16 elements unaligned.
        steps = data[:, :head].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        offset, step, scale = torch.split(steps, [channels, channels, heads * tokens], 1)
        k, v = np.split(data[:, head:].numpy(), 2, axis=1)
        x = torch.empty((layers, heads, tokens, width))
        numbers = x.view(layers, -1).numpy()
        unpack(k, self.bits, numbers)
        offset, step = (part.reshape(layers, heads, 1, width) for part in (offset, step))
        out[:, 0] = torch.addcmul(offset, x, step, out=x)
        unpack(v, self.bits, numbers)
        scale = scale.reshape(layers, heads, tokens, 1)
        out[:, 1] = torch.addcmul(scale * -self.middle, x, scale, out=x)

    @property
    def top(self) -> int:
        return int((1 << self.bits) - 1)

    @property
    def middle(self) -> int:
        return int((1 << (self.bits - 1)) - 1)


def _bf16(x: torch.Tensor, up: bool) -> torch.Tensor:
    """The nearest bf16 that is not below (`up`) or not above `x`."""
    y = x.to(torch.bfloat16)
    wrong = y.float() < x if up else y.float() > x
    toward = torch.tensor(torch.inf if up else -torch.inf, dtype=torch.bfloat16)
    return torch.where(wrong, torch.nextafter(y, toward), y)
