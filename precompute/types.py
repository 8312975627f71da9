"""What the KV queue is handed: a reader that compiles, and a store that keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from storage.types import KVProfile, KVRecord


class Compiler(Protocol):
    """A loaded reader model. Called by one thread at a time."""

    @property
    def profile(self) -> KVProfile: ...

    def compile(self, batch: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Each chunk's KV: [layers, 2, kv_heads, tokens, head_dim] in the profile's dtype, K before RoPE."""
        ...


class RecordStore(Protocol):
    def put(self, record: KVRecord) -> int:
        """Bytes written. Raises StorageUnavailable."""
        ...


# The keys under which these token ids belong, in a sharing group; None where there is no stored KV.
KVKeys = Callable[[Sequence[tuple[int, ...]], str], Sequence[str | None]]
