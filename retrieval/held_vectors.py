"""Vectors that searches have read, in memory, so that candidates are not fetched from the database again and again."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 256 << 20  # touched as vectors come: 174,000 of 384 components

Vectors = NDArray[np.float32]


class HeldVectors:
    """A vector has a key that no other one ever gets, and its place is what is left of the key divided by the number of
    places: who came last is there. Threads may share it."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = MOST_BYTES if most_bytes is None else most_bytes
        self._lock = threading.Lock()
        self._keys: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._vectors: Vectors = np.empty((0, 0), dtype="<f4")

    def get(self, keys: NDArray[np.int64], dimensions: int) -> tuple[Vectors, NDArray[np.bool_]]:
        """Vectors [n, dimensions], and which of them are there; the others are anything."""
        with self._lock:
            if not len(self._keys):
                return np.empty((len(keys), dimensions), dtype="<f4"), np.zeros(len(keys), dtype=bool)
            places = keys % len(self._keys)
            return self._vectors[places], self._keys[places] == keys

    def put(self, keys: NDArray[np.int64], vectors: Vectors) -> None:
        with self._lock:
            if not len(self._keys):
                self._make(vectors.shape[1])
            places = keys % len(self._keys)
            self._keys[places] = keys
            # Two keys may have one place: the last one's vector has to be there.
            self._vectors[places] = vectors

    def _make(self, dimensions: int) -> None:
        places = max(1, self._most_bytes // (8 + 4 * dimensions))
        self._keys = np.full(places, -1, dtype=np.int64)
        self._vectors = np.empty((places, dimensions), dtype="<f4")
