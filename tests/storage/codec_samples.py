"""Every codec there is, for tensors of a given shape, and how far from the truth each may be."""

from __future__ import annotations

import dataclasses

import torch

from storage.codecs import CODECS, Codec
from storage.codecs.basis import SLACK, Basis
from storage.codecs.transform import Transform
from storage.types import CODEC_NAMES, KVProfile

NAMES = CODEC_NAMES
EXACT = ("raw", "lossless")
_ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}


def basis(profile: KVProfile, seed: int = 0) -> Basis:
    """A basis of no model; the same for the same arguments on every machine."""
    shape = (profile.layers, 2, profile.kv_heads, profile.head_dim)
    count = profile.layers * 2 * profile.kv_heads * profile.head_dim
    means = ((torch.arange(count) * 7 + seed) % 11 / 16 - 0.25).reshape(shape)
    noise = (torch.arange(count * profile.head_dim) * 13 + seed) % 7 / 64
    matrices = torch.eye(profile.head_dim) / 4 + noise.reshape(*shape, profile.head_dim) / profile.head_dim
    return Basis(means.float(), matrices.to(torch.bfloat16))


def codec_for(name: str, profile: KVProfile) -> tuple[Codec, KVProfile]:
    """The codec, and the profile with its full name."""
    codec: Codec = Transform(basis(profile)) if name == "transform" else CODECS[name]
    return codec, dataclasses.replace(profile, codec=codec.name)


def allowed(codec: Codec, kv: torch.Tensor) -> torch.Tensor:
    """The stated bound of the error of every element of `kv` [layers, 2, kv_heads, tokens, head_dim]."""
    x, rounding = kv.double(), _ROUNDING[kv.dtype]
    if isinstance(codec, Transform):
        matrices = codec.basis.matrices.double()
        half = matrices.abs().sum(-2) * (0.5 + SLACK)
        # What a component's rounding to the dtype adds, brought back to elements, and that of the elements themselves.
        spread = matrices.abs().transpose(-1, -2) @ torch.linalg.inv(matrices).abs().transpose(-1, -2)
        largest = (x.abs() + half.unsqueeze(-2)) * 2 * rounding
        return half.unsqueeze(-2) + largest @ spread.transpose(-1, -2) + largest
    bits = codec.bits  # type: ignore[attr-defined]
    k, v = x[:, 0], x[:, 1]
    low, high = k.amin(2, keepdim=True), k.amax(2, keepdim=True)
    k_step = 1.02 * (high - low + low.abs() / 64) / (2**bits - 1)
    v_top = v.abs().amax(3, keepdim=True)
    v_step = 1.02 * v_top / (2 ** (bits - 1) - 1)
    k_error = k_step / 2 + rounding * torch.maximum(low.abs(), high.abs())
    v_error = v_step / 2 + rounding * v_top
    tiny = 2e-38  # steps are normal numbers
    return torch.stack([k_error.expand_as(k), v_error.expand_as(v)], 1) + tiny
