"""Every codec there is, for tensors of a given shape, and how far from the truth each may be."""

from __future__ import annotations

import dataclasses

import torch

from storage.codecs import CODECS, Codec
from storage.codecs.basis import SLACK, Basis
from storage.codecs.transform import Transform
from storage.types import CODEC_NAMES, KVProfile

NAMES = tuple(name for name in CODEC_NAMES if name != "transform8")  # the same codec with another basis
EXACT = ("raw", "lossless")
_ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}


def basis(profile: KVProfile, seed: int = 0) -> Basis:
    """A basis of no model; the same for the same arguments on every machine."""
    layers, heads, width = profile.layers, profile.kv_heads, profile.head_dim
    means = ((torch.arange(layers * 2 * heads * width) * 7 + seed) % 11 / 16 - 0.25).view(layers, 2, heads, width)
    noise = (torch.arange(layers * heads * width * width) * 13 + seed) % 7 / 64
    matrices = torch.eye(width) / 4 + noise.view(layers, heads, width, width) / width
    return Basis(means.float(), (torch.arange(layers) + 8) / 16, matrices.to(torch.bfloat16))


def codec_for(name: str, profile: KVProfile) -> tuple[Codec, KVProfile]:
    """The codec, and the profile with its full name."""
    codec: Codec = Transform(basis(profile)) if name == "transform" else CODECS[name]
    return codec, dataclasses.replace(profile, codec=codec.name)


def allowed(codec: Codec, kv: torch.Tensor) -> torch.Tensor:
    """The stated bound of the error of every element of `kv` [layers, 2, kv_heads, tokens, head_dim]."""
    x, rounding, info = kv.double(), _ROUNDING[kv.dtype], torch.finfo(kv.dtype)
    subnormal = info.smallest_normal * info.eps / 2  # what rounding adds where the dtype has no more digits
    if isinstance(codec, Transform):
        matrices = codec.basis.matrices.double()
        half = (0.5 + SLACK) * matrices.abs().sum(-2)
        # What a component's rounding to the dtype adds, brought back to elements, and that of the elements themselves.
        spread = torch.linalg.inv(matrices).abs() @ matrices.abs()
        largest = (x[:, 0].abs() + half.unsqueeze(-2)) * 2 * rounding
        k_error = half.unsqueeze(-2) + largest @ spread + largest
        v_half = ((0.5 + SLACK) * codec.basis.steps.double()).view(-1, 1, 1, 1)
        return torch.stack([k_error, v_half + (x[:, 1].abs() + v_half) * 2 * rounding], 1) + subnormal
    bits = codec.bits  # type: ignore[attr-defined]
    k, v = x[:, 0], x[:, 1]
    low, high = k.amin(2, keepdim=True), k.amax(2, keepdim=True)
    k_step = 1.02 * (high - low + low.abs() / 64) / (2**bits - 1)
    v_top = v.abs().amax(3, keepdim=True)
    v_step = 1.02 * v_top / (2 ** (bits - 1) - 1)
    k_error = k_step / 2 + rounding * torch.maximum(low.abs(), high.abs())
    v_error = v_step / 2 + rounding * v_top
    tiny = 2e-38  # steps are normal numbers
    return torch.stack([k_error.expand_as(k), v_error.expand_as(v)], 1) + tiny + subnormal
