"""Transform coding with a basis of the model's own, after KVTC (Staniszewski and Łańcucki, 2025): decorrelate, quantise
every component with the same step, let an entropy coder spend the bits where the signal is.

The basis (`storage/codecs/basis.py`) comes from calibration and is data: a verified object of its own, whose digest
stands in the codec's name. It says per layer and head: k = mean + q @ matrix, v = mean + q * step, q integers. V is not
rotated: its channels hardly depend on each other, and the product would cost more than the bits. Section: a byte, 0 for
a layer that is stored as the codec `lossless` does, 1 for the following.

K: the header `_HEAD`: how many components take 16, 8, 4 and 2 bits, and how long the frame of each of these classes is;
then its frames. A frame holds the integers of one class, first components first, each component's [kv_heads, tokens]
filled up with zeros to a multiple of four, with 256, 128, 8 or 2 added, packed as `packing` says. Components after these
classes are zero for all tokens. V: the bits of all its integers, u8, and one such frame of [kv_heads, tokens, head_dim].
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from storage.codecs.basis import Basis
from storage.codecs.lossless import Lossless
from storage.codecs.packing import pack, packed_length, unpack
from storage.codecs.zstd import Packer, Unpacker

PREFIX = "transform:"
_LOSSLESS, _CODED = 0, 1
_HEAD = struct.Struct("<4H4I")
_CLASSES = ((16, 256), (8, 128), (4, 8), (2, 2))  # bits of an integer, and what is added to it so that it is not negative
_LARGEST = 256


@dataclass(frozen=True)
class Transform:
    """|V' - V| <= step / 2. Per vector k of a head, z = (k' - k) @ inverse(matrix) holds |z| <= 1/2 in every component, so
    |k' - k| <= |matrix|.sum(0) / 2. To both comes what rounding the result to the dtype adds. What calibration has not
    foreseen costs bytes, never more error: the encoder reads back what it wrote, and stores a layer without loss where the
    bound would not hold. Raises ValueError for NaN and infinities."""

    basis: Basis

    @property
    def name(self) -> str:
        return PREFIX + self.basis.digest

    def encode(self, layer: torch.Tensor, number: int = 0) -> memoryview:
        """See Codec."""
        if not math.isfinite(float(layer.float().abs().max())):
            raise ValueError("the KV holds numbers that cannot be quantised")
        layer_shape = (layer.shape[0], layer.shape[1], layer.shape[2], layer.shape[3])
        self._check(number, layer_shape)
        k = self.basis.k_components(layer[0], number).round_().permute(2, 0, 1)
        v = self.basis.v_components(layer[1], number).round_()
        if max(float(k.abs().max()), float(v.abs().max())) <= _LARGEST:
            packer = Packer()
            parts = _pack_k(packer, k.to(torch.int16).numpy()), _pack_v(packer, v.to(torch.int16).numpy())
            section = bytes([_CODED]) + b"".join(parts)
            found = self.decode([torch.frombuffer(bytearray(section), dtype=torch.uint8)], layer.dtype, layer_shape, number)
            if self.basis.holds(found[0], layer, number):
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
        out, unpacker = torch.empty((len(sections), *layer_shape), dtype=dtype), Unpacker()
        for number, (section, layer) in enumerate(zip(sections, out, strict=True), first):
            self._check(number, layer_shape)
            self._read(unpacker, section, number, layer)
        return out

    def _check(self, number: int, shape: Sequence[int]) -> None:
        layers, _, heads, width = self.basis.means.shape
        if number >= layers or (shape[1], shape[3]) != (heads, width):
            raise ValueError("the basis is one of another model")

    def _read(self, unpacker: Unpacker, section: torch.Tensor, number: int, out: torch.Tensor) -> None:
        data = section.numpy().data
        if data[0] == _LOSSLESS:
            out.copy_(Lossless().decode([section[1:]], out.dtype, tuple(out.shape))[0])  # type: ignore[arg-type]
            return
        if data[0] != _CODED:
            raise ValueError("a section of no known kind")
        x, rest = _unpack_k(unpacker, data[1:], out.shape[1:])
        self.basis.expand_k(x, number, out[0])
        self.basis.expand_v(_unpack_v(unpacker, rest, out.shape[1:]), number, out[1])


def _pack_v(packer: Packer, integers: npt.NDArray[np.int16]) -> bytes:
    """V of a layer: [kv_heads, tokens, head_dim], from -256 to 256."""
    largest = int(np.abs(integers).max())
    bits, added = min((bits, added) for bits, added in _CLASSES if largest < added or bits == 16)
    return bytes([bits]) + packer.pack(pack((integers.reshape(-1) + added).astype(np.uint16), bits).data)


def _unpack_v(unpacker: Unpacker, data: memoryview, shape: Sequence[int]) -> torch.Tensor:
    """The integers as fp32 [kv_heads, tokens, head_dim]."""
    bits = data[0] if len(data) else 0
    added = dict(_CLASSES).get(bits)
    if added is None:
        raise ValueError("a section is cut, or its V of no known kind")
    x = np.empty(shape, np.float32)
    unpack(unpacker.unpack(data[1:], packed_length(x.size, bits)), bits, added, x.reshape(-1))
    return torch.from_numpy(x)


def _pack_k(packer: Packer, integers: npt.NDArray[np.int16]) -> bytes:
    """K of a layer: [components, kv_heads, tokens], from -256 to 256."""
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
        frames.append(packer.pack(pack(values, bits).data) if len(values) else b"")
    return _HEAD.pack(*counts, *map(len, frames)) + b"".join(frames)


def _unpack_k(unpacker: Unpacker, data: memoryview, shape: Sequence[int]) -> tuple[torch.Tensor, memoryview]:
    """The integers as fp32 [1 + components, kv_heads, tokens], the first row being 1, and the bytes behind the frames."""
    heads, tokens, width = shape
    if len(data) < _HEAD.size:
        raise ValueError("a section is cut")
    fields = _HEAD.unpack_from(data)
    counts, lengths = fields[:4], fields[4:]
    if sum(counts) > width or _HEAD.size + sum(lengths) > len(data):
        raise ValueError("a section has too many components, or is cut")
    columns = _columns(heads * tokens)
    x = np.empty((1 + sum(counts), columns), np.float32)
    x[0] = 1
    row, at = 1, _HEAD.size
    for (bits, added), rows, length in zip(_CLASSES, counts, lengths, strict=True):
        frame, at = data[at : at + length], at + length
        if rows:
            packed = unpacker.unpack(frame, packed_length(rows * columns, bits))
            unpack(packed, bits, added, x[row : row + rows].reshape(-1))
        elif length:
            raise ValueError("a frame of no component")
        row += rows
    return torch.from_numpy(x).as_strided((len(x), heads, tokens), (columns, tokens, 1)), data[at:]


def _columns(vectors: int) -> int:
    """Integers of one component, filled up with zeros so that each component starts with a byte."""
    return -(-vectors // 4) * 4
