"""What the KV queue is handed: who compiles, where it is stored, and who else may have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from storage.conditioning import Reading
from storage.types import KVProfile, KVRecord


@dataclass(frozen=True)
class Wanted:
    """KV to be stored under `key`: of the last chunk of `reading`, with `codec` (None: the reader's own)."""

    key: str
    sharing_group: str
    reading: Reading
    codec: str | None = None


@dataclass(frozen=True)
class Made:
    """What has become of a batch, by key: bytes of what is stored now; what nobody is to blame for, so that it is tried again;
    and what failed by its own fault. Each key is in one of them."""

    written: Mapping[str, int]
    unstored: Sequence[str] = ()
    failed: Sequence[str] = ()


class Compiler(Protocol):
    """Computes chunks' KV and has it stored. Called by one thread at a time."""

    def compile(self, batch: Sequence[Wanted]) -> Callable[[], Made]:
        """Compute a batch. What is returned has it stored: another thread calls it, while the next batch is computed.

        Raises Stopping and Cancelled, as it is told; EngineUnavailable where another process computes that is not there."""
        ...


class LoadedReader(Protocol):
    """A reader model in this process. Called by one thread at a time."""

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
