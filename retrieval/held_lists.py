"""Lists of chunks by what was asked of the text search, in memory: a few words stand in most questions, and theirs are the
longest lists."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
MOST_BYTES = 32 << 20  # of the longest lists two thousand
ENTRY = 512  # bytes that Python needs for one, about


class HeldLists:
    """The lists that were used last. `of` is a number that stands for the chunks as they were. Threads may share it."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = MOST_BYTES if most_bytes is None else most_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, str], Ids] = OrderedDict()
        self._bytes = 0

    def get(self, of: int, asked: Sequence[str]) -> dict[str, Ids]:
        """Those that are here."""
        with self._lock:
            found = {each: self._held[of, each] for each in asked if (of, each) in self._held}
            for each in found:
                self._held.move_to_end((of, each))
            return found

    def put(self, of: int, lists: Mapping[str, Ids]) -> None:
        with self._lock:
            for asked, ids in lists.items():
                if (of, asked) not in self._held:
                    self._held[of, asked] = ids
                    self._bytes += ENTRY + ids.nbytes
            while self._bytes > self._most_bytes:
                _, ids = self._held.popitem(last=False)
                self._bytes -= ENTRY + ids.nbytes
