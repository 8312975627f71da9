"""How the integers of a transform codec's section are packed: kind 2, which is written. It is made for its reader: one frame a
layer, and what is done with all numbers is done by a few calls, each over a whole array.

The header `_HEAD`, then one frame of, in this order: K's components with a byte for an integer; K's components with half a
byte; V's integers, a byte each; and for what a byte does not hold a second one: integer = low + 256 * high, both signed. A
component is [kv_heads, tokens], V [kv_heads, tokens, head_dim]. A half is the integer plus 8; the first half of the
components lies in the lower halves of the bytes, the second in the upper ones. Components behind these are zero for all tokens.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from storage.codecs.zstd import Packer, Unpacker

_HEAD = struct.Struct("<3HB")  # components of K with two bytes, with one or two, with half a byte; bytes of an integer of V
_BYTE, _HALF = 127, 7  # the largest integers that these hold

Bytes = npt.NDArray[np.uint8]  # of signed numbers
Integers = npt.NDArray[np.int16]


def pack_layer(k: Integers, v: Integers) -> bytes:
    """K [components, kv_heads * tokens] and V [kv_heads * tokens * head_dim]."""
    largest = np.abs(k).max(axis=1)
    # A class ends behind the last component that is too large for the next one.
    double, whole, end = (int(np.flatnonzero(largest > limit).max(initial=-1)) + 1 for limit in (_BYTE, _HALF, 0))
    if (end - whole) % 2:  # halves go by two
        whole, end = (whole, end + 1) if end < len(k) else (whole + 1, end)
    first, second = np.split((k[whole:end] + 8).astype(np.uint8), 2)
    each = 2 if np.abs(v).max() > _BYTE else 1
    parts = [low(k[:whole]), first | second << 4, low(v), high(k[:double]), high(v[: v.size * (each - 1)])]
    frame = Packer().pack(*(part.reshape(-1).data for part in parts if part.size))
    return _HEAD.pack(double, whole, end - whole, each) + frame


def low(integers: Integers) -> Bytes:
    """Their lower bytes."""
    return integers.astype(np.uint8)


def high(integers: Integers) -> Bytes:
    """What they lack beside their lower bytes, which are signed, in units of 256."""
    return ((integers + 128) >> 8).astype(np.uint8)


def unpack_layer(unpacker: Unpacker, data: memoryview, k: Bytes, v: Bytes) -> tuple[Bytes, Bytes]:
    """Fills `k` [components, kv_heads * tokens] and `v` with lower bytes; the higher ones of the first components [some,
    kv_heads * tokens], and of all of V or of none. Raises ValueError where these are not such bytes."""
    if len(data) < _HEAD.size:
        raise ValueError("a section is cut")
    double, whole, halves, each = _HEAD.unpack_from(data)
    columns, middle, end = k.shape[1], whole + halves // 2, whole + halves
    if double > whole or end > len(k) or halves % 2 or each not in (1, 2):
        raise ValueError("a section has components that there are not")
    content = unpacker.unpack(data[_HEAD.size :], (middle + double) * columns + each * v.size)
    k[:whole] = content[: whole * columns].reshape(whole, columns)
    pairs = content[whole * columns : middle * columns].reshape(-1, columns)
    np.bitwise_and(pairs, 15, out=k[whole:middle])
    np.right_shift(pairs, 4, out=k[middle:end])
    k[whole:end] -= 8
    k[end:] = 0
    v[:] = content[middle * columns : middle * columns + v.size]
    more = content[middle * columns + v.size :]
    return more[: double * columns].reshape(double, columns), more[double * columns :]
