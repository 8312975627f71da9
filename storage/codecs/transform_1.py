"""How the integers of a transform codec's section were packed first: kind 1. It is read for ever and no longer written, since
its reader spent half of its time on several frames a layer and on a copy of K in another order.

K: the header `_HEAD`: how many components take 16, 8, 4 and 2 bits, and how long the frame of each of these classes is;
then its frames. A frame holds the integers of one class, first components first, each component's [kv_heads, tokens]
filled up with zeros to a multiple of four, with 256, 128, 8 or 2 added, packed as `packing` says. Components after these
classes are zero for all tokens. V: the bits of all its integers, u8, and one such frame of [kv_heads, tokens, head_dim].
"""

from __future__ import annotations

import struct

import numpy as np

from storage.codecs.basis import Patches
from storage.codecs.packing import packed_length, unpack
from storage.codecs.transform_2 import Bytes, Integers, patches
from storage.codecs.zstd import Unpacker

_HEAD = struct.Struct("<4H4I")
_CLASSES = {16: 256, 8: 128, 4: 8, 2: 2}  # bits of an integer, and what is added to it so that it is not negative


def unpack_layer(unpacker: Unpacker, data: memoryview, row: Bytes) -> Patches:
    """As that of `transform_2`."""
    if len(data) < _HEAD.size:
        raise ValueError("a section is cut")
    fields = _HEAD.unpack_from(data)
    counts, lengths = fields[:4], fields[4:]
    components, columns = len(row) // 2, row.shape[1]
    if sum(counts) > components or _HEAD.size + sum(lengths) >= len(data):
        raise ValueError("a section has too many components, or is cut")
    numbers = np.zeros(row.shape, np.int16)
    begin, at = 0, _HEAD.size
    for bits, rows, length in zip(_CLASSES, counts, lengths, strict=True):
        frame, at = data[at : at + length], at + length
        if rows:
            filled = -(-columns // 4) * 4
            numbers[begin : begin + rows] = _integers(unpacker, frame, bits, rows * filled).reshape(rows, filled)[:, :columns]
        elif length:
            raise ValueError("a frame of no component")
        begin += rows
    if data[at] not in _CLASSES:
        raise ValueError("V of no known kind")
    v = _integers(unpacker, data[at + 1 :], data[at], components * columns)
    numbers[components:] = v.reshape(components, columns)
    row[:] = numbers.astype(np.uint8)
    return patches(row, *np.split(_high(numbers), 2))


def _high(integers: Integers) -> Bytes:
    """What they lack beside their lower bytes, which are signed, in units of 256."""
    return ((integers.reshape(-1) + 128) >> 8).astype(np.uint8)


def _integers(unpacker: Unpacker, frame: memoryview, bits: int, count: int) -> Integers:
    numbers = np.empty(count, np.int16)
    unpack(unpacker.unpack(frame, packed_length(count, bits)), bits, numbers)
    numbers -= _CLASSES[bits]
    return numbers
