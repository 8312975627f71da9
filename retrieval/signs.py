"""Nearest vectors among many: candidates by the signs of their components, then exactly by cosine.

A unit vector's signs, a bit for each component, tell nearness roughly (Charikar, STOC 2002) at a thirty-second of the
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EXACT = 1024  # so many vectors, or those that pass a filter, are all compared exactly
CANDIDATES = 512  # at least, of more than that
LOOKED_AT_TWICE = 16  # times as many as are asked for


def signs(vectors: NDArray[np.float32]) -> NDArray[np.uint64]:
    """[n, d] → [n, ceil(d / 64)]: one bit for each component that is above zero."""
    bits = np.packbits(vectors > 0, axis=1)
    return np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8))).view("<u8")


def nearest(codes: NDArray[np.uint64], vector: NDArray[np.float32], wanted: int) -> NDArray[np.intp]:
    """Positions in `codes` [words, n], best first, `LOOKED_AT_TWICE` times as many as are wanted: those in which the fewest
    bits differ from the vector's, ranked by the vector itself with their signs."""
    code = signs(vector[None])[0]
    different = np.zeros(codes.shape[1], dtype=np.uint16)
    for row, word in zip(codes, code, strict=True):
        different += np.bitwise_count(row ^ word)
    first = _least(different, LOOKED_AT_TWICE * wanted)
    rows = np.ascontiguousarray(codes[:, first].T)
    return first[np.argsort(-_sums(rows.view(np.uint8), vector), kind="stable")]


def _sums(rows: NDArray[np.uint8], vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of the vector's components where a row [n, bytes] has a bit: by bytes, since a product would make floats of all bits."""
    parts = np.pad(vector, (0, 8 * rows.shape[1] - len(vector))).reshape(-1, 8)
    table = parts @ np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).T.astype("<f4")  # [bytes, 256]
    sums: NDArray[np.float32] = np.take(table, rows + 256 * np.arange(len(parts))).sum(1)
    return sums


def _least(values: NDArray[np.uint16], most: int) -> NDArray[np.intp]:
    """Positions of the `most` smallest values, in order of position; of equals the first."""
    if len(values) <= most:
        return np.arange(len(values))
    limit = int(np.searchsorted(np.cumsum(np.bincount(values)), most))
    below = np.flatnonzero(values < limit)
    equal = np.flatnonzero(values == limit)
    return np.sort(np.concatenate([below, equal[: most - len(below)]]))


def vectors(rows: Sequence[bytes], dimensions: int) -> NDArray[np.float32]:
    """[n, dimensions] of vectors as stored."""
    return np.frombuffer(b"".join(rows), dtype="<f4").reshape(len(rows), dimensions)


def cosines(rows: NDArray[np.float32], vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of unit vectors [n, d] with a unit vector, by this thread alone: threads that a product wakes are busy waiting for the next
    one, while others would search."""
    found: NDArray[np.float32] = np.vecdot(rows, vector)
    return found
