"""Small unsigned integers, two or four to a byte, and back by shifts of whole arrays.

Integers of 16 bits lie in two planes, low bytes first: the high ones are nearly all alike, and an entropy coder drops them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
AT_ONCE = 1 << 19  # elements of K or V: what a call costs in itself is then little beside its work


def spans(layers: int, elements: int) -> Iterator[slice]:
    """Layers to decode together, for `elements` of K in each: as many in each step, so that few shapes of arrays come up."""
    steps = -(-layers * elements // AT_ONCE)
    each = -(-layers // min(layers, steps))
    return (slice(start, min(start + each, layers)) for start in range(0, layers, each))


def packed_length(count: int, bits: int) -> int:
    """Bytes that `count` values of `bits` bits (2, 4, 8 or 16) take."""
    return -(-count * bits // 8)


def pack(values: npt.NDArray[np.unsignedinteger[Any]], bits: int) -> Bytes:
    """`values` [count], each below 2**bits (2, 4 or 8), as uint8 [packed_length]: the first value in the lowest bits, zeros at
    the end."""
    if bits == 8:
        return values.astype(np.uint8)
    each = 8 // bits
    padded = np.zeros((packed_length(len(values), bits), each), np.uint8)
    padded.reshape(-1)[: len(values)] = values
    packed: Bytes = np.bitwise_or.reduce(padded << np.arange(0, 8, bits, dtype=np.uint8), axis=1)
    return packed


def unpack(data: Bytes, bits: int, out: npt.NDArray[Any]) -> None:
    """The inverse of `pack`, for 16 bits as well, along the last axis: fills `out` [..., count], of a type that holds the
    numbers, from `data` [..., packed_length(count, bits)]."""
    if bits == 16:
        low, high = np.split(data, 2, axis=-1)
        np.multiply(high, 256, out=out, dtype=out.dtype)
        out += low
        return
    for half in (4, 2):
        if bits <= half:
            data = _halves(data, half)
    np.copyto(out, data[..., : out.shape[-1]])


def _halves(data: Bytes, bits: int) -> Bytes:
    """Each number of twice as many bits as two bytes, the lower `bits` of it first."""
    spread = data.astype("<u2")
    spread |= spread << (8 - bits)
    spread &= 0x101 * ((1 << bits) - 1)
    return spread.view(np.uint8)
