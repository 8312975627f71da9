"""How the integers of a transform codec's section are packed: kind 3, which is written. It is made for its reader, for whom every
call and every symbol counts.

K and V are one row of integers: K's components [kv_heads, tokens], then V [kv_heads, tokens, head_dim]. From `begin` to `end` an
integer has half a byte, before and behind a byte. A byte is signed; a half is the integer plus 8, and the first half of them
lies in the lower halves of the bytes, the second in the upper ones.

What is too large for its place stands in a list, with 0 in its place, so that it costs its neighbours nothing; after
Zukowski et al., "Super-Scalar RAM-CPU Cache Compression", 2006. The header `_HEAD`; places in the row, u32, and integers, i8, of
what a half does not hold; places, u32, and integers, i16, of what a byte does not hold; one frame of the bytes and the halves.
"""

from __future__ import annotations

import struct

import numpy as np

from storage.codecs.basis import Patches
from storage.codecs.transform_2 import Bytes, Integers
from storage.codecs.zstd import Packer, Unpacker

_HEAD = struct.Struct("<4I")  # begin, end; integers that no half holds, integers that no byte holds
_BYTE, _HALF = 127, 7  # the largest integers that these hold
_RARE = 0.003  # of V's integers: halves pay though so many are too large
_LOWER, _FOUR, _EIGHT = (np.array(number, np.uint8) for number in (15, 4, 8))  # numbers would be made arrays at each use


def pack_layer(k: Integers, v: Integers) -> bytes:
    """K [components, kv_heads * tokens] and V [kv_heads * tokens * head_dim], the integers from -256 to 256."""
    row = np.concatenate([k.reshape(-1), v])
    size = np.abs(row)
    begin, end = _halves(size.reshape(2 * len(k), -1))
    large = begin + np.flatnonzero((size[begin:end] > _HALF) & (size[begin:end] <= _BYTE))
    wide = np.flatnonzero(size > _BYTE)
    lists = [large.astype("<u4"), row[large].astype("<i1"), wide.astype("<u4"), row[wide].astype("<i2")]
    row[large] = row[wide] = 0
    low, high = np.split((row[begin:end] + 8).astype(np.uint8), 2)
    parts = [row[:begin].astype(np.uint8), low | high << 4, row[end:].astype(np.uint8)]
    frame = Packer().pack(*(part.data for part in parts if part.size))
    return b"".join([_HEAD.pack(begin, end, len(large), len(wide)), *(each.tobytes() for each in lists), frame])


def _halves(size: Integers) -> tuple[int, int]:
    """Where integers of these sizes [2 * components, kv_heads * tokens] shall have half a byte."""
    components, columns = len(size) // 2, size.shape[1]
    large = size > _HALF
    end = len(size) if large[components:].mean() <= _RARE else components
    # Components are sorted, the largest first. In them nothing is rare enough to be worth the time that a list takes.
    begin = int(np.flatnonzero(large[:components].any(axis=1)).max(initial=-1)) + 1
    return begin * columns + (end - begin) * columns % 2, end * columns


def unpack_layer(unpacker: Unpacker, data: memoryview, row: Bytes) -> Patches | None:
    """As that of `transform_2`."""
    if len(data) < _HEAD.size:
        raise ValueError("a section is cut")
    row = row.reshape(-1)
    begin, end, large, wide = _HEAD.unpack_from(data)
    wides = _HEAD.size + 5 * large
    frame = wides + 6 * wide
    if not begin <= end <= len(row) or (end - begin) % 2 or frame >= len(data):
        raise ValueError("a section has integers that there are not")
    half = (end - begin) // 2
    middle = begin + half
    content = unpacker.unpack(data[frame:], len(row) - half)
    halves, integers = content[begin:middle], row[begin:end]
    row[:begin] = content[:begin]
    np.bitwise_and(halves, _LOWER, integers[:half])
    np.right_shift(halves, _FOUR, integers[half:])
    np.subtract(integers, _EIGHT, integers)
    row[end:] = content[middle:]
    if large:
        places = np.frombuffer(data, "<u4", large, _HEAD.size)
        if places.max() >= len(row):
            raise ValueError("a section has integers where there is nothing")
        row[places] = np.frombuffer(data, np.uint8, large, _HEAD.size + 4 * large)
    if not wide:
        return None
    return np.frombuffer(data, "<u4", wide, wides).astype(np.int64), np.frombuffer(data, "<i2", wide, wides + 4 * wide)
