"""Vectors of queries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from storage.types import TextEmbedder

CACHED_QUERIES = 256


class QueryVectors:
    """The last queries' vectors: a conversation asks the same thing more than once."""

    def __init__(self, embedder: TextEmbedder) -> None:
        self._embedder = embedder
        self._lock = threading.Lock()
        self._vectors: OrderedDict[str, Sequence[float]] = OrderedDict()

    def get(self, query: str) -> Sequence[float]:
        with self._lock:
            if query in self._vectors:
                self._vectors.move_to_end(query)
                return self._vectors[query]
        vector = self._embedder.embed([query])[0]
        with self._lock:
            self._vectors[query] = vector
            while len(self._vectors) > CACHED_QUERIES:
                self._vectors.popitem(last=False)
        return vector
