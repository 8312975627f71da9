"""How the integers of a transform codec's section were packed by the second version: kind 2. It is read for ever and no longer
written: half bytes were for K only, and one large integer gave all of its component a byte.

The header `_HEAD`, then one frame of, in this order: K's components with a byte for an integer; K's components with half a
byte; V's integers, a byte each; and for what a byte does not hold a second one: integer = low + 256 * high, both signed. A
component is [kv_heads, tokens], V [kv_heads, tokens, head_dim]. A half is the integer plus 8; the first half of the
components lies in the lower halves of the bytes, the second in the upper ones. Components behind these are zero for all tokens.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from storage.codecs.basis import Patches
from storage.codecs.zstd import Unpacker

_HEAD = struct.Struct("<3HB")  # components of K with two bytes, with one or two, with half a byte; bytes of an integer of V

Bytes = npt.NDArray[np.uint8]  # of signed numbers
Integers = npt.NDArray[np.int16]


def unpack_layer(unpacker: Unpacker, data: memoryview, row: Bytes) -> Patches | None:
    """Fills `row` [2 * components, kv_heads * tokens], K's components and as many integers of V, but for what 8 bits do not hold:
    patches, whose places count through all of it. Raises ValueError where these are not such bytes."""
    if len(data) < _HEAD.size:
        raise ValueError("a section is cut")
    double, whole, halves, each = _HEAD.unpack_from(data)
    components, columns = len(row) // 2, row.shape[1]
    middle, end = whole + halves // 2, whole + halves
    if double > whole or end > components or halves % 2 or each not in (1, 2):
        raise ValueError("a section has components that there are not")
    size = components * columns
    content = unpacker.unpack(data[_HEAD.size :], (middle + double) * columns + each * size)
    row[:whole] = content[: whole * columns].reshape(whole, columns)
    pairs = content[whole * columns : middle * columns].reshape(-1, columns)
    np.bitwise_and(pairs, 15, out=row[whole:middle])
    np.right_shift(pairs, 4, out=row[middle:end])
    row[whole:end] -= 8
    row[end:components] = 0
    row[components:] = content[middle * columns : middle * columns + size].reshape(components, columns)
    more = content[middle * columns + size :]
    return patches(row, more[: double * columns], more[double * columns :]) if more.size else None


def patches(row: Bytes, k_high: Bytes, v_high: Bytes) -> Patches:
    """Where higher bytes, of the first integers of K and of V, make integers that the lower ones in `row` are not."""
    places = np.concatenate([np.flatnonzero(k_high), row.size // 2 + np.flatnonzero(v_high)])
    high = np.concatenate([each[each != 0] for each in (k_high, v_high)])
    return places, row.reshape(-1)[places].view(np.int8) + high.view(np.int8) * np.int16(256)
