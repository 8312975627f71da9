"""Transform coding with a basis of the model's own, after KVTC (Staniszewski and Łańcucki, 2025): decorrelate, quantise
every component with the same step, let an entropy coder spend the bits where the signal is.

The basis (`storage/codecs/basis.py`) comes from calibration and is data: a verified object of its own, whose digest
stands in the codec's name. It says per layer and head: k = mean + q @ matrix, v = mean + q * step, q integers. V is not
rotated: its channels hardly depend on each other, and the product would cost more than the bits.

The first byte of a section says how the integers are packed: 0, not at all, the layer is stored as the codec `lossless`
does; 1 to 3, as `transform_1` to `transform_3` say. The integers are the same, so the codec's name is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from storage.codecs import transform_1, transform_2, transform_3
from storage.codecs.basis import NO_PATCHES, Basis, Patches
from storage.codecs.lossless import Lossless
from storage.codecs.packing import spans
from storage.codecs.scratch import Scratch, ScratchPool
from storage.codecs.zstd import Unpacker

PREFIX = "transform:"
TRANSFORMS = ("transform", "transform8")  # as settings and rules name them: the basis is the one that the store has for the model
_LOSSLESS, _PACKED = 0, 3
_UNPACK = {1: transform_1.unpack_layer, 2: transform_2.unpack_layer, _PACKED: transform_3.unpack_layer}
_LARGEST = 256
_POOL = ScratchPool()


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
            integers = k.to(torch.int16).reshape(len(k), -1), v.to(torch.int16).reshape(-1)
            section = bytes([_PACKED]) + transform_3.pack_layer(*(each.numpy() for each in integers))
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
        self._check(first + len(sections) - 1, layer_shape)
        out, unpacker = torch.empty((len(sections), *layer_shape), dtype=dtype), Unpacker()
        with _POOL.borrowed() as scratch:
            for span in spans(len(sections), math.prod(layer_shape[1:])):
                with scratch.room():
                    self._read(unpacker, scratch, sections[span], first + span.start, out[span])
        return out

    def _check(self, number: int, shape: Sequence[int]) -> None:
        layers, _, heads, width = self.basis.means.shape
        if number >= layers or (shape[1], shape[3]) != (heads, width):
            raise ValueError("the basis is one of another model")

    def _read(
        self, unpacker: Unpacker, scratch: Scratch, sections: Sequence[torch.Tensor], first: int, out: torch.Tensor
    ) -> None:
        """Fills `out` [layers, *layer_shape]."""
        layers, _, heads, tokens, width = out.shape
        each = heads * tokens * width
        rows = scratch.take((layers, 2 * width, heads * tokens), torch.int8)
        by_layer = rows.numpy().view(np.uint8)
        patches: dict[int, Patches] = {}
        kept = []
        for number, section in enumerate(sections):
            data = section.numpy().data
            if (unpack := _UNPACK.get(data[0])) is not None:
                if (found := unpack(unpacker, data[1:], by_layer[number])) is not None:
                    patches[number] = found
            elif data[0] == _LOSSLESS:
                kept.append(number)
            else:
                raise ValueError("a section of no known kind")
        k, v = rows[:, :width].view(layers, width, heads, tokens), rows[:, width:].view(layers, heads, tokens, width)
        k_patches, v_patches = _apart(patches, each)
        with scratch.room():
            self.basis.expand_k(k, k_patches, first, out[:, 0], scratch)
        self.basis.expand_v(v, v_patches, first, out[:, 1], scratch)
        for number in kept:
            out[number] = Lossless().decode([sections[number][1:]], out.dtype, (2, heads, tokens, width))[0]


def _apart(patches: Mapping[int, Patches], each: int) -> tuple[Patches, Patches]:
    """Those of several layers, ascending, whose K and V have `each` integers: positions in all layers' K, and in their V."""
    if not patches:
        return NO_PATCHES, NO_PATCHES
    places = np.concatenate([at + 2 * each * number for number, (at, _) in patches.items()])
    integers = np.concatenate([some for _, some in patches.values()])
    if any(at.max(initial=0) >= 2 * each for at, _ in patches.values()) or (places[1:] <= places[:-1]).any():
        raise ValueError("integers where there is nothing, or in no order")
    layer, place = np.divmod(places, 2 * each)
    of_v = place >= each
    place += each * (layer - of_v)
    return (place[~of_v], integers[~of_v]), (place[of_v], integers[of_v])
