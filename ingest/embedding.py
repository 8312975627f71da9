"""Texts of several files, embedded together: many small files make as full batches as a large one.

Who asks goes on, and takes the vectors later. Texts of like length go to the encoder together: it pads the shorter ones.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from storage.types import TextEmbedder

log = structlog.get_logger()
BATCH = 32  # texts that the encoder is given at once
GROUP = 512  # texts that are sorted together, of several files
_LOOK_SECONDS = 0.2  # how often who waits for vectors asks whether they are still wanted

Vectors = list[list[float] | None]


class Asked:
    """A file's texts, and their vectors once `done` is: None for a text that the encoder cannot take."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.done: Future[Vectors] = Future()
        self.wanted = True
        self._vectors: Vectors = [None] * len(texts)
        self._missing = len(texts)

    def drop(self) -> None:
        """They are wanted no more: what is not computed yet will not be."""
        self.wanted = False

    def result(self, check: Callable[[], None]) -> Vectors:
        """Wait for the vectors. Raises what `check` raises, which is called all the while."""
        while True:
            check()
            try:
                return self.done.result(_LOOK_SECONDS)
            except TimeoutError:
                continue

    def answer(self, index: int, vector: list[float] | None) -> None:
        self._vectors[index] = vector
        self._missing -= 1
        if not self._missing:
            self.done.set_result(self._vectors)


class EmbedQueue:
    """Embeds in a thread of its own, in the order of asking by groups. It is always the same thread: tokenizers and the
    encoder's kernels keep memory for each that has called them."""

    def __init__(self, embedder: TextEmbedder) -> None:
        self._embedder = embedder
        self._lock = threading.Lock()
        self._waiting: deque[Asked] = deque()
        self._works = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")

    def ask(self, texts: Sequence[str]) -> Asked:
        """Have texts embedded, one at least."""
        asked = Asked(texts)
        with self._lock:
            self._waiting.append(asked)
            if not self._works:
                self._works = True
                self._thread.submit(self._work)
        return asked

    def _work(self) -> None:
        while group := self._next():
            try:
                self._embed(group)
            except Exception as error:  # noqa: BLE001 - who waits must be told, whatever it is
                for asked in group:
                    if not asked.done.done():
                        asked.done.set_exception(error)

    def _next(self) -> list[Asked]:
        with self._lock:
            group: list[Asked] = []
            texts = 0
            while self._waiting and (not group or texts + len(self._waiting[0].texts) <= GROUP):
                group.append(self._waiting.popleft())
                texts += len(group[-1].texts)
            self._works = bool(group)
            return group

    def _embed(self, group: Sequence[Asked]) -> None:
        each = [(asked, index) for asked in group for index in range(len(asked.texts))]
        each.sort(key=lambda one: len(one[0].texts[one[1]]))
        for start in range(0, len(each), BATCH):
            some = [(asked, index) for asked, index in each[start : start + BATCH] if asked.wanted]
            vectors = self._batch(some) if some else []
            for (asked, index), vector in zip(some, vectors, strict=True):
                asked.answer(index, vector)

    def _batch(self, some: Sequence[tuple[Asked, int]]) -> Vectors:
        """One vector per text, None for one that the embedder cannot take: it fails alone, not its whole batch. What nobody wants
        any more, as in a process that ends, is not tried again."""
        if not any(asked.wanted for asked, _ in some):
            return [None] * len(some)
        texts = [asked.texts[index] for asked, index in some]
        try:
            vectors = self._embedder.embed(texts)
        except Exception as error:  # noqa: BLE001 - one text's fault stays with that text
            log.warning("embedding_failed", texts=len(texts), error=type(error).__name__)
            if len(texts) == 1:
                return [None]
            half = len(texts) // 2
            return [*self._batch(some[:half]), *self._batch(some[half:])]
        return [vector if all(map(math.isfinite, vector)) else None for vector in vectors]
