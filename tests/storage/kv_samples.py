"""Small records and stores for the tests of stored KV."""

from __future__ import annotations

import torch

from storage.format import DTYPES
from storage.keys import kv_key
from storage.types import KVProfile, KVRecord

SECRET = bytes(range(32))
PROFILE = KVProfile(
    model="org/model",
    weights="w-1",
    tokenizer="t-1",
    frame="f-1",
    conditioning="filler:8:abc",
    codec="raw",
    dtype="bfloat16",
    layers=2,
    kv_heads=1,
    head_dim=4,
)


def record(tokens: int = 3, profile: KVProfile = PROFILE, seed: int = 0, group: str = "g") -> KVRecord:
    """A record whose numbers follow from its arguments alone, on every machine."""
    ids = tuple(seed * 1000 + number for number in range(tokens))
    shape = (profile.layers, 2, profile.kv_heads, tokens, profile.head_dim)
    count = int(torch.Size(shape).numel())
    numbers = (torch.arange(count, dtype=torch.int64) * 37 + seed * 11) % 251 - 125
    kv = (numbers.to(torch.float32) / 16).to(DTYPES[profile.dtype]).reshape(shape)
    return KVRecord(kv_key(profile, ids, group, SECRET), profile, ids, kv)


def to_buffer(data: bytes) -> torch.Tensor:
    """The bytes as a tensor uint8 [size] of its own."""
    buffer = torch.empty(len(data), dtype=torch.uint8)
    buffer.numpy().data[:] = data
    return buffer


def same(one: object, other: KVRecord) -> bool:
    """Equal in every field, and bit for bit in the tensor (NaN included)."""
    return (
        isinstance(one, KVRecord)
        and (one.key, one.profile, one.token_ids) == (other.key, other.profile, other.token_ids)
        and one.kv.dtype == other.kv.dtype
        and one.kv.shape == other.kv.shape
        and torch.equal(one.kv.contiguous().view(torch.uint8), other.kv.contiguous().view(torch.uint8))
    )
