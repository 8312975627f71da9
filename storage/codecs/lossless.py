"""The model's own numbers in fewer bytes: byte planes, each behind an entropy coder. Error bound: none, bit for bit.

Byte j of every element is kept together; planes of exponents compress well, planes of mantissas hardly at all. Section:
per plane u32 length, then the planes one after another; a plane as long as the layer has elements is stored as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from storage.codecs.zstd import Packer, Unpacker

WORTH = 0.95  # a plane that zstd makes hardly smaller is stored as it is, and read at the speed of memory


@dataclass(frozen=True)
class Lossless:
    """Byte planes, least significant first, each a Zstandard frame where that pays."""

    name: str = "lossless"

    def encode(self, layer: torch.Tensor, number: int = 0) -> memoryview:
        """Any bit pattern, NaN included."""
        planes = layer.view(torch.uint8).reshape(-1, layer.element_size()).numpy()
        packer = Packer()
        parts = [_smaller(packer, np.ascontiguousarray(planes[:, which]).data) for which in range(planes.shape[1])]
        return memoryview(struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts))

    def decode(
        self,
        sections: Sequence[torch.Tensor],
        dtype: torch.dtype,
        layer_shape: tuple[int, int, int, int],
        first: int = 0,
    ) -> torch.Tensor:
        """See Codec."""
        out, unpacker = torch.empty((len(sections), *layer_shape), dtype=dtype), Unpacker()
        for section, layer in zip(sections, out, strict=True):
            _read(unpacker, section.numpy().data, layer.view(torch.uint8).reshape(-1, dtype.itemsize).numpy())
        return out


def _smaller(packer: Packer, plane: memoryview) -> bytes:
    packed = packer.pack(plane)
    return packed if len(packed) < WORTH * len(plane) else bytes(plane)


def _read(unpacker: Unpacker, section: memoryview, out: npt.NDArray[np.uint8]) -> None:
    """Fills `out` uint8 [elements, bytes of an element]."""
    elements, count = out.shape
    if len(section) < 4 * count:
        raise ValueError("a section is cut")
    lengths = struct.unpack_from(f"<{count}I", section)
    if 4 * count + sum(lengths) != len(section):
        raise ValueError("a section is not as long as its planes")
    at = 4 * count
    for which, length in enumerate(lengths):
        plane = section[at : at + length]
        at += length
        out[:, which] = np.frombuffer(plane, np.uint8) if length == elements else unpacker.unpack(plane, elements)
