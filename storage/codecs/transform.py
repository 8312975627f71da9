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

from storage.codecs.basis import ONES, Basis
from storage.codecs.lossless import Lossless
from storage.codecs.packing import pack, packed_length, spans, unpack
from storage.codecs.zstd import Packer, Unpacker

PREFIX = "transform:"
TRANSFORMS = ("transform", "transform8")  # as settings and rules name them: the basis is the one that the store has for the model
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
        for number in range(first, first + len(sections)):
            self._check(number, layer_shape)
        out, unpacker = torch.empty((len(sections), *layer_shape), dtype=dtype), Unpacker()
        for span in spans(len(sections), math.prod(layer_shape[1:])):
            self._read(unpacker, sections[span], first + span.start, out[span])
        return out

    def _check(self, number: int, shape: Sequence[int]) -> None:
        layers, _, heads, width = self.basis.means.shape
        if number >= layers or (shape[1], shape[3]) != (heads, width):
            raise ValueError("the basis is one of another model")

    def _read(self, unpacker: Unpacker, sections: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        """Fills `out` [layers, *layer_shape]."""
        layers, _, heads, tokens, width = out.shape
        k = np.empty((layers, ONES + width, _columns(heads * tokens)), np.int16)
        k[:, :ONES] = 1
        v = np.zeros((layers, heads * tokens * width), np.float32)
        added, kept = [0] * layers, []
        for number, section in enumerate(sections):
            data = section.numpy().data
            if data[0] == _CODED:
                rest = _unpack_k(unpacker, data[1:], k[number, ONES:])
                added[number] = _unpack_v(unpacker, rest, v[number])
            elif data[0] == _LOSSLESS:
                kept.append(number)
            else:
                raise ValueError("a section of no known kind")
        self.basis.expand_k(k[..., : heads * tokens].reshape(layers, -1, heads, tokens), first, out[:, 0])
        self.basis.expand_v(torch.from_numpy(v).view(layers, heads, tokens, width), torch.tensor(added), first, out[:, 1])
        for number in kept:
            out[number] = Lossless().decode([sections[number][1:]], out.dtype, tuple(out.shape[1:]))[0]  # type: ignore[arg-type]


def _pack_v(packer: Packer, integers: npt.NDArray[np.int16]) -> bytes:
    """V of a layer: [kv_heads, tokens, head_dim], from -256 to 256."""
    largest = int(np.abs(integers).max())
    bits, added = min((bits, added) for bits, added in _CLASSES if largest < added or bits == 16)
    return bytes([bits]) + packer.pack(pack((integers.reshape(-1) + added).astype(np.uint16), bits).data)


def _unpack_v(unpacker: Unpacker, data: memoryview, out: npt.NDArray[np.float32]) -> int:
    """Fills `out` [kv_heads * tokens * head_dim] and says what was added to its integers."""
    bits = data[0] if len(data) else 0
    added = dict(_CLASSES).get(bits)
    if added is None:
        raise ValueError("a section is cut, or its V of no known kind")
    unpack(unpacker.unpack(data[1:], packed_length(out.size, bits)), bits, out)
    return added


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


def _unpack_k(unpacker: Unpacker, data: memoryview, out: npt.NDArray[np.int16]) -> memoryview:
    """Fills `out` [head_dim, columns] with the integers; the bytes behind the frames."""
    if len(data) < _HEAD.size:
        raise ValueError("a section is cut")
    fields = _HEAD.unpack_from(data)
    counts, lengths = fields[:4], fields[4:]
    if sum(counts) > len(out) or _HEAD.size + sum(lengths) > len(data):
        raise ValueError("a section has too many components, or is cut")
    row, at = 0, _HEAD.size
    for (bits, added), rows, length in zip(_CLASSES, counts, lengths, strict=True):
        frame, at = data[at : at + length], at + length
        if rows:
            numbers = out[row : row + rows].reshape(-1)
            unpack(unpacker.unpack(frame, packed_length(numbers.size, bits)), bits, numbers)
            numbers -= added
        elif length:
            raise ValueError("a frame of no component")
        row += rows
    out[row:] = 0
    return data[at:]


def _columns(vectors: int) -> int:
    """Integers of one component, filled up with zeros so that each component starts with a byte."""
    return -(-vectors // 4) * 4
