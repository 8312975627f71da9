"""The blended start of recent prompts, kept in memory: a conversation's next turn over the same chunks computes its own
text only."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

Key = tuple[str, ...]  # KV key of every chunk, sorted


@dataclass(frozen=True)
class Blended:
    """Frame, labels and chunks of a prompt, `kv` [layers, 2, kv_heads, tokens, head_dim] with K at its position.

    `order`: the KV keys of its chunks as they stand in it."""

    kv: torch.Tensor
    order: tuple[str, ...]


class BlendedCache:
    """The most recently used ones, up to `max_bytes` in all. Safe to share between threads.

    The next question may rank the same chunks in another order; that is no reason to blend them again, so an entry is found
    by their set, and the prompt keeps its order.
    A KV key is an HMAC under its sharing group's secret, so that an entry is found by those only who may read all of its
    chunks."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, Blended] = OrderedDict()
        self._lock = threading.Lock()
        self.forgotten = 0  # calls of `forget`: what was begun before one is not kept after it

    def get(self, key: Key) -> Blended | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Key, kv: torch.Tensor, order: tuple[str, ...], forgotten: int) -> None:
        """Keep a copy, at the cost of those not used for longest. What is larger than all room is not kept, nor what was begun
        when `forgotten` was another."""
        if kv.nbytes > self._max_bytes or forgotten != self.forgotten:
            return
        entry = Blended(kv.clone(), order)
        with self._lock:
            if forgotten != self.forgotten:
                return
            self._entries[key] = entry
            self._entries.move_to_end(key)
            while self._bytes() > self._max_bytes:
                self._entries.popitem(last=False)

    def keys(self) -> set[str]:
        """The KV keys of all chunks in it."""
        with self._lock:
            return {key for chunks in self._entries for key in chunks}

    def forget(self, kv_keys: Iterable[str]) -> None:
        """Drop what holds any of these chunks: they were deleted."""
        gone = set(kv_keys)
        with self._lock:
            self.forgotten += 1
            for key in [key for key in self._entries if not gone.isdisjoint(key)]:
                del self._entries[key]

    def _bytes(self) -> int:
        return sum(entry.kv.nbytes for entry in self._entries.values())
