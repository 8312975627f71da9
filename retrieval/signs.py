"""Nearest vectors among many: candidates by the signs of their components, then exactly by cosine.

A unit vector's signs, a bit for each component, tell nearness roughly (Charikar, STOC 2002) at a thirty-second of the
bytes. Up to `CANDIDATES` vectors are compared exactly, so that a search in a small corpus is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CANDIDATES = 1024
LOOKED_AT_TWICE = 4 * CANDIDATES
WORD = 64  # bits


def signs(vectors: NDArray[np.float32]) -> NDArray[np.uint64]:
    """[n, d] → [n, ceil(d / 64)]: one bit for each component that is above zero."""
    bits = np.packbits(vectors > 0, axis=1)
    return np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8))).view("<u8")


def nearest(codes: NDArray[np.uint64], vector: NDArray[np.float32]) -> NDArray[np.intp]:
    """All rows of `codes` by the number of bits in which they differ from the vector's, fewest first; the first of them
    once more, by the vector itself with their signs."""
    code = signs(vector[None])[0]
    different = np.zeros(len(codes), dtype=np.uint16)
    for column in range(codes.shape[1]):
        different += np.bitwise_count(codes[:, column] ^ code[column])
    order = np.argsort(different, kind="stable")  # of 16 bits: a radix sort
    first = order[:LOOKED_AT_TWICE]
    bits = np.unpackbits(codes[first].view(np.uint8), axis=1, count=len(vector))
    return np.concatenate([first[np.argsort(-(bits @ vector), kind="stable")], order[LOOKED_AT_TWICE:]])


def cosines(rows: Sequence[bytes], vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of unit vectors as stored, with a unit vector."""
    return np.frombuffer(b"".join(rows), dtype="<f4").reshape(len(rows), len(vector)) @ vector
