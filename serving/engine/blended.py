"""KV of recent prompts, kept in memory within a budget: the blended start of grounded ones, and the turns of plain ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Kept:
    """`kv` [layers, 2, kv_heads, tokens, head_dim] with K at its position. `chunks`: the KV keys of all stored chunks that
    it has seen. `names`: what it may be looked up by besides its own key."""

    kv: torch.Tensor
    chunks: frozenset[str]
    names: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Blended(Kept):
    """Frame, labels, headers and chunks of a grounded prompt. `order`: the KV key and the header of each of its chunks as they
    stand in it."""

    order: tuple[tuple[str, str], ...] = ()


class BlendedCache:
    """The most recently used entries, up to `max_bytes` in all. Safe to share between threads.

    A grounded prompt's key is the set of its chunks' KV keys and headers: the next question may rank the same chunks in another
    order, which is no reason to blend them again, so the prompt keeps its order. A KV key is an HMAC under its sharing group's
    secret, so that an entry is found by those only who may read all of its chunks. For turns see `conversations`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, Kept] = OrderedDict()
        self._named: dict[Hashable, dict[Hashable, None]] = {}  # name → keys, the latest last
        self._bytes = 0
        self._lock = threading.Lock()
        self.forgotten = 0  # calls of `forget`: what was begun before one is not kept after it

    def get(self, key: Hashable) -> Kept | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def named(self, name: Hashable) -> list[Kept]:
        """All entries of this name, the latest first; none counts as used."""
        with self._lock:
            return [self._entries[key] for key in reversed(self._named.get(name, {}))]

    def put(self, key: Hashable, entry: Kept, forgotten: int) -> None:
        """Keep a copy, at the cost of those not used for longest. What is larger than all room is not kept, nor what was begun
        when `forgotten` was another."""
        if entry.kv.nbytes > self._max_bytes or forgotten != self.forgotten:
            return
        entry = replace(entry, kv=entry.kv.clone())
        with self._lock:
            if forgotten != self.forgotten:
                return
            self._drop(key)
            self._entries[key] = entry
            self._bytes += entry.kv.nbytes
            for name in entry.names:
                self._named.setdefault(name, {})[key] = None
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def keys(self) -> set[str]:
        """The KV keys of all chunks in it."""
        with self._lock:
            return {key for entry in self._entries.values() for key in entry.chunks}

    def forget(self, kv_keys: Iterable[str]) -> None:
        """Drop what has seen any of these chunks: they were deleted."""
        gone = set(kv_keys)
        with self._lock:
            self.forgotten += 1
            for key in [key for key, entry in self._entries.items() if not gone.isdisjoint(entry.chunks)]:
                self._drop(key)

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._bytes -= entry.kv.nbytes
        for name in entry.names:
            self._named[name].pop(key)
            if not self._named[name]:
                del self._named[name]
