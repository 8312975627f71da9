"""Codecs: how a layer's KV becomes a section of bytes. One file each, one line in the table.

A transform codec is not in the table: it is one with its basis, and its name says which. `storage/codecs/shelf.py` finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from storage.codecs.lossless import Lossless
from storage.codecs.quantised import Quantised
from storage.codecs.raw import Raw

if TYPE_CHECKING:
    import torch


class Codec(Protocol):
    """Equal tensors give equal bytes. `name` stands in the profile, so another version needs another name."""

    @property
    def name(self) -> str: ...

    def encode(self, layer: torch.Tensor, number: int = 0) -> memoryview:
        """Bytes of layer `number` [2, kv_heads, tokens, head_dim], contiguous, on the CPU; a view if possible.

        Raises ValueError where the codec cannot hold such numbers."""
        ...

    def decode(
        self,
        sections: Sequence[torch.Tensor],
        dtype: torch.dtype,
        layer_shape: tuple[int, int, int, int],
        first: int = 0,
    ) -> torch.Tensor:
        """The layers from `first` on as [layers, *layer_shape], from their uint8 sections, in order, of one buffer.

        A view of the buffer where possible. Raises ValueError where a section cannot be such a layer;
        allocates nothing larger than the result."""
        ...


CODECS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Raw(), Lossless(), Quantised("int8", 8), Quantised("int4", 4))}
)
