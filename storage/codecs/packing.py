"""Small unsigned integers, two or four to a byte, and back by table: a byte becomes its numbers in one look-up.

Integers of 16 bits lie in two planes, low bytes first: the high ones are nearly all alike, and an entropy coder drops them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def packed_length(count: int, bits: int) -> int:
    """Bytes that `count` values of `bits` bits (2, 4, 8 or 16) take."""
    return -(-count * bits // 8)


def pack(values: npt.NDArray[np.unsignedinteger[Any]], bits: int) -> Bytes:
    """`values` [count], each below 2**bits, as uint8 [packed_length]: the first value in the lowest bits, zeros at the end."""
    if bits >= 8:
        return np.concatenate([(values >> shift).astype(np.uint8) for shift in range(0, bits, 8)])
    each = 8 // bits
    padded = np.zeros((packed_length(len(values), bits), each), np.uint8)
    padded.reshape(-1)[: len(values)] = values
    packed: Bytes = np.bitwise_or.reduce(padded << np.arange(0, 8, bits, dtype=np.uint8), axis=1)
    return packed


def unpack(data: Bytes, bits: int, subtract: int, out: npt.NDArray[np.float32]) -> None:
    """The inverse of `pack`, less `subtract`: fills `out` [count], contiguous, from packed_length(count, bits) bytes."""
    if bits >= 8:
        np.subtract(data if bits == 8 else data.reshape(2, -1).T.copy().view("<u2")[:, 0], np.float32(subtract), out=out)
        return
    table, each = _table(bits, subtract), 8 // bits
    whole = len(out) // each
    np.take(table, data[:whole], out=out[: whole * each].view(table.dtype), mode="clip")
    if whole < len(data):
        out[whole * each :] = table[data[-1:]].view(np.float32)[: len(out) - whole * each]


@cache
def _table(bits: int, subtract: int) -> npt.NDArray[Any]:
    """What each byte holds: [256], an element as wide as the fp32 of all the numbers in a byte."""
    numbers = (np.arange(256)[:, None] >> np.arange(0, 8, bits)) % (1 << bits) - subtract
    return numbers.astype(np.float32).view(np.complex64 if bits == 4 else np.complex128)[:, 0]
