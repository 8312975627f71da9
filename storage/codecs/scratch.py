"""Memory for what lives no longer than one decoding, used again by the next one, in huge pages where the system has them.
Where malloc gives back to the system what is freed, fresh pages take a fifth of a decoder's time."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator, Sequence

import torch

KEPT = 4 << 20  # bytes: what a group of layers needs in bf16
IDLE = 8  # that wait for the next decoding
_ALIGN = 64


class Scratch:
    """Memory of one decoding. What is taken later lies behind what was taken before."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, KEPT)
        with contextlib.suppress(AttributeError, OSError):  # a system that has none
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """What is taken inside is given back at its end, and must not be used after it."""
        used = self._used
        try:
            yield
        finally:
            self._used = used

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An array of `shape`, of whatever numbers were there; of fresh memory where it is larger than what is left."""
        count = math.prod(shape)
        begin = self._used
        end = begin + count * dtype.itemsize
        if not count or end > len(self._memory):
            return torch.empty(tuple(shape), dtype=dtype)
        self._used = end + -end % _ALIGN
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=begin).view(tuple(shape))


class ScratchPool:
    """As many as are in use at once, by whatever threads: those that read are short-lived. The last one used is the next."""

    def __init__(self) -> None:
        self._idle: list[Scratch] = []  # its pop and append are atomic

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Scratch]:
        """A scratch for the caller alone, empty."""
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = Scratch()
        try:
            with scratch.room():
                yield scratch
        finally:
            if len(self._idle) < IDLE:
                self._idle.append(scratch)
