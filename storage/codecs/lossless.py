"""The model's own numbers in fewer bytes: byte planes, each behind an entropy coder. Error bound: none, bit for bit.

Byte j of every element is kept together; planes of exponents compress well, planes of mantissas hardly at all. Section:
per plane u32 length, then the planes one after another; a plane as long as the layer has elements is stored as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        elements = out.view(torch.uint8).numpy().view(f"<u{dtype.itemsize}").reshape(len(sections), -1)
        for section, layer in zip(sections, elements, strict=True):
            _read(unpacker, section.numpy().data, layer)
        return out


def _smaller(packer: Packer, plane: memoryview) -> bytes:
    packed = packer.pack(plane)
    return packed if len(packed) < WORTH * len(plane) else bytes(plane)


def _read(unpacker: Unpacker, section: memoryview, out: npt.NDArray[Any]) -> None:
    """Fills `out` [elements], unsigned integers as wide as an element. By shifts of whole arrays: three times as fast as
    writing every second byte."""
    elements, count = len(out), out.itemsize
    if len(section) < 4 * count:
        raise ValueError("a section is cut")
    lengths = struct.unpack_from(f"<{count}I", section)
    if 4 * count + sum(lengths) != len(section):
        raise ValueError("a section is not as long as its planes")
    at = len(section)
    for number, length in enumerate(reversed(lengths)):  # most significant first
        at -= length
        packed = section[at : at + length]
        plane = np.frombuffer(packed, np.uint8) if length == elements else unpacker.unpack(packed, elements)
        if number == 0:
            out[:] = plane
        else:
            np.left_shift(out, 8, out=out)
            np.bitwise_or(out, plane, out=out)
