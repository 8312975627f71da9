"""Small unsigned integers, two or four to a byte, and back by table: a byte becomes its numbers in one look-up.

Integers of 16 bits lie in two planes, low bytes first: the high ones are nearly all alike, and an entropy coder drops them.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
_WIDE = MappingProxyType({4: torch.int32, 8: torch.int64, 16: torch.complex128})


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


def unpack(data: Bytes, bits: int, subtract: int, out: torch.Tensor) -> None:
    """The inverse of `pack`, less `subtract`: fills `out` [count], contiguous, bf16 or fp32, from packed_length(count, bits)
    bytes. Its storage offset must be a multiple of 8 / bits."""
    if bits >= 8:
        low, *high = torch.from_numpy(data).view(bits // 8, -1)
        out.copy_(low.short() + 256 * high[0].short() - subtract if high else low).sub_(0 if high else subtract)
        return
    table = _table(bits, subtract, out.dtype)
    index, whole = torch.from_numpy(data).int(), len(out) * bits // 8
    torch.index_select(table, 0, index[:whole], out=out[: whole * (8 // bits)].view(table.dtype))
    if whole < len(data):
        rest = out[whole * (8 // bits) :]
        rest.copy_(table[index[whole:].long()].view(out.dtype)[: len(rest)])


@cache
def _table(bits: int, subtract: int, dtype: torch.dtype) -> torch.Tensor:
    """What each byte holds: [256], an element as wide as all the numbers in a byte."""
    shifts = torch.arange(0, 8, bits)
    numbers = ((torch.arange(256)[:, None] >> shifts) % (1 << bits) - subtract).to(dtype)
    return numbers.view(_WIDE[numbers[0].nbytes]).view(-1)
