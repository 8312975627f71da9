"""Codecs: how a layer's KV becomes a section of bytes. One file each, one line in the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from storage.codecs.raw import Raw

if TYPE_CHECKING:
    import torch


class Codec(Protocol):
    """Equal tensors give equal bytes. `name` stands in the profile, so another version needs another name."""

    @property
    def name(self) -> str: ...

    def encode(self, layer: torch.Tensor) -> memoryview:
        """Bytes of one layer [2, kv_heads, tokens, head_dim], contiguous, on the CPU; a view if possible."""
        ...

    def decode(
        self, sections: Sequence[torch.Tensor], dtype: torch.dtype, layer_shape: tuple[int, int, int, int]
    ) -> torch.Tensor:
        """All layers as [layers, *layer_shape], from their uint8 sections, in order, of one buffer.

        A view of the buffer where possible. Raises ValueError where a section cannot be such a layer;
        allocates nothing larger than the result."""
        ...


CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in (Raw(),)})
