"""Transform coding with a basis of the model's own, after KVTC (Staniszewski and Łańcucki, 2025): decorrelate, quantise
every component with the same step, let an entropy coder spend the bits where the signal is.

The basis (`storage/codecs/basis.py`) comes from calibration and is data: a verified object of its own, whose digest
stands in the codec's name. It says per layer, K or V, and head: x = mean + q @ matrix, q integers. Section: a byte, 0 for
a layer that is stored as the codec `lossless` does, 1 for the following. For K, then for V, the header `_HEAD`: how many
components take 16, 8, 4 and 2 bits, and how long the frame of each of these classes is; then its frames. A frame holds
the integers of one class, first components first, each component's [kv_heads, tokens] filled up with zeros to a multiple
of four, with 256, 128, 8 or 2 added, packed as `packing` says. Components after these classes are zero for all tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from storage.codecs.basis import Basis
from storage.codecs.lossless import Lossless
from storage.codecs.packing import pack, packed_length, unpack
from storage.codecs.zstd import compress, decompress

PREFIX = "transform:"
_LOSSLESS, _CODED = 0, 1
_HEAD = struct.Struct("<4H4I")
_CLASSES = ((16, 256), (8, 128), (4, 8), (2, 2))  # bits of an integer, and what is added to it so that it is not negative
_LARGEST = 256  # what bf16 holds exactly


@dataclass(frozen=True)
class Transform:
    """Per vector x of a head, z = (x' - x) @ inverse(matrix) holds |z| <= 1/2 in every component (and what rounding the
    result to the dtype adds), so |x' - x| <= |matrix|.sum(0) / 2. What calibration has not foreseen costs bytes, never
    more error: the encoder reads back what it wrote, and stores a layer without loss where the bound would not hold.
    Raises ValueError for NaN and infinities."""

    basis: Basis

    @property
    def name(self) -> str:
        return PREFIX + self.basis.digest

    def encode(self, layer: torch.Tensor, number: int = 0) -> memoryview:
        """See Codec."""
        if not bool(layer.isfinite().all()):
            raise ValueError("the KV holds numbers that cannot be quantised")
        self._check(number, layer.shape)
        integers = self.basis.integers(layer, number)  # [2, components, kv_heads, tokens]
        if float(integers.abs().max()) <= _LARGEST:
            section = bytes([_CODED]) + b"".join(_pack(each.to(torch.int16).numpy()) for each in integers)
            found = torch.empty_like(layer)
            self._read(torch.frombuffer(bytearray(section), dtype=torch.uint8), number, found)
            if self.basis.holds(found, layer, number):
                return memoryview(section)
        return memoryview(bytes([_LOSSLESS]) + Lossless().encode(layer))

    def decode(
        self,
        sections: Sequence[torch.Tensor],
        dtype: torch.dtype,
        layer_shape: tuple[int, int, int, int],
        first: int = 0,
    ) -> torch.Tensor:
        """See Codec."""
        out = torch.empty((len(sections), *layer_shape), dtype=dtype)
        for number, (section, layer) in enumerate(zip(sections, out, strict=True), first):
            self._check(number, layer.shape)
            self._read(section, number, layer)
        return out

    def _check(self, number: int, shape: torch.Size) -> None:
        layers, _, heads, width = self.basis.means.shape
        if number >= layers or (shape[1], shape[3]) != (heads, width):
            raise ValueError("the basis is one of another model")

    def _read(self, section: torch.Tensor, number: int, out: torch.Tensor) -> None:
        data = section.numpy().data
        if data[0] == _LOSSLESS:
            out.copy_(Lossless().decode([section[1:]], out.dtype, tuple(out.shape))[0])  # type: ignore[arg-type]
            return
        if data[0] != _CODED:
            raise ValueError("a section of no known kind")
        rest = data[1:]
        for which in range(2):
            x, rest = _unpack(rest, out.shape[1:], self.basis.compute_dtype(out.dtype))
            self.basis.expand(x, number, which, out[which])
        if len(rest):
            raise ValueError("a section is longer than its frames")


def _pack(integers: npt.NDArray[np.int16]) -> bytes:
    """K or V of a layer: [components, kv_heads, tokens], from -256 to 256."""
    largest = np.abs(integers).max(axis=(1, 2))
    # A class ends behind the last component that is too large for the next one.
    ends = [int(np.flatnonzero(largest > limit).max(initial=-1)) + 1 for limit in (127, 7, 1, 0)]
    vectors = integers[0].size
    filled = np.zeros((len(integers), _columns(vectors)), np.int16)
    filled[:, :vectors] = integers.reshape(-1, vectors)
    counts, frames = [], []
    for (bits, added), start, end in zip(_CLASSES, (0, *ends), ends, strict=False):
        values = (filled[start:end].reshape(-1) + added).astype(np.uint16)
        counts.append(end - start)
        frames.append(compress(pack(values, bits).data) if len(values) else b"")
    return _HEAD.pack(*counts, *map(len, frames)) + b"".join(frames)


def _unpack(data: memoryview, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
    """The integers as `dtype` [2 + components, kv_heads, tokens], the first two being 1, and the bytes behind the frames."""
    heads, tokens, width = shape
    if len(data) < _HEAD.size:
        raise ValueError("a section is cut")
    fields = _HEAD.unpack_from(data)
    counts, lengths = fields[:4], fields[4:]
    if sum(counts) > width or _HEAD.size + sum(lengths) > len(data):
        raise ValueError("a section has too many components, or is cut")
    columns = _columns(heads * tokens)
    x = torch.empty((2 + sum(counts), columns), dtype=dtype)
    x[:2] = 1
    row, at = 2, _HEAD.size
    for (bits, added), rows, length in zip(_CLASSES, counts, lengths, strict=True):
        frame, at = data[at : at + length], at + length
        if rows:
            unpack(decompress(frame, packed_length(rows * columns, bits)), bits, added, x[row : row + rows].view(-1))
        elif length:
            raise ValueError("a frame of no component")
        row += rows
    return x.as_strided((len(x), heads, tokens), (columns, tokens, 1)), data[at:]


def _columns(vectors: int) -> int:
    """Integers of one component, filled up with zeros so that each component starts with a byte."""
    return -(-vectors // 4) * 4
