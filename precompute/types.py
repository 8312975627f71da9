"""What the KV queue is handed: a reader that compiles, and a store that keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from storage.conditioning import Reading
from storage.types import KVProfile, KVRecord


class Compiler(Protocol):
    """A loaded reader model. Called by one thread at a time."""

    @property
    def profile(self) -> KVProfile: ...

    def stored_as(self, codec: str | None) -> KVProfile:
        """The profile of KV stored with a codec of CODEC_NAMES; None: the reader's own. Raises StorageUnavailable."""
        ...

    def compile_readings(self, batch: Sequence[Reading]) -> list[torch.Tensor]:
        """The KV of each reading's last chunk: [layers, 2, kv_heads, tokens, head_dim] in the profile's dtype, K before
        RoPE."""
        ...


class RecordStore(Protocol):
    def put(self, record: KVRecord) -> int:
        """Bytes written. Raises StorageUnavailable."""
        ...



@dataclass(frozen=True)
class Elsewhere:
    """What another site has of some keys: bytes by key of what it stores, and what it is computing."""

    stored: Mapping[str, int] = field(default_factory=dict)
    awaited: frozenset[str] = frozenset()


AskElsewhere = Callable[[Sequence[str]], Elsewhere]


def nowhere(keys: Sequence[str]) -> Elsewhere:
    """There is no other site."""
    return Elsewhere()
