"""Texts of several files, embedded together: many small files make as full batches as a large one.

Who asks goes on, and takes the vectors later. Texts of like length go to the encoder together: it pads the shorter ones.
Tenants take turns batch by batch, and a tenant's files come in as there is room for them, so that nobody waits for a very
large text of another.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter

import structlog

from storage.types import TextEmbedder

log = structlog.get_logger()
BATCH = 64  # texts that the encoder is given in one call
GROUP = 512  # texts of a tenant that are sorted together, of several files: a round
_LOOK_SECONDS = 0.2  # how often who waits for vectors asks whether they are still wanted

Vectors = list[list[float] | None]


class Asked:
    """A file's texts, and their vectors once `done` is: None for a text that the encoder cannot take."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.done: Future[Vectors] = Future()
        self.wanted = True
        self.placed = 0  # how many of the texts have a place in a round
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


@dataclass(frozen=True, slots=True)
class _Text:
    length: int
    asked: Asked
    index: int


class _Line:
    """What one tenant waits for, in rounds of `GROUP` texts at most, the short ones of a round first. A file that comes joins
    the round with the texts that are no shorter than the last one taken, and the next round with the others: so batches are
    of like length, and what has a place waits for no more than two rounds."""

    def __init__(self) -> None:
        self.files: deque[Asked] = deque()
        self._round: list[_Text] = []
        self._next: list[_Text] = []
        self._joined = 0  # texts that have joined the round, taken or not
        self._length = 0  # of the last text that was taken

    def __bool__(self) -> bool:
        return bool(self._round or self._next or self.files)

    def take(self, most: int) -> list[tuple[Asked, int]]:
        self._fill()
        taken = self._from_round(most)
        if len(taken) < most:
            self._round, self._next, self._joined = self._next, [], len(self._next)
            taken += self._from_round(most - len(taken))
        if taken:
            self._length = taken[-1].length
        return [(text.asked, text.index) for text in taken]

    def _from_round(self, most: int) -> list[_Text]:
        taken = self._round[:most]
        del self._round[:most]
        return taken

    def _fill(self) -> None:
        """Of a file that has more texts than there is room for, the rest comes after the other files."""
        begun = []
        while self.files and (room := GROUP - len(self._round) - len(self._next)) > 0:
            asked = self.files.popleft()
            if not asked.wanted:
                continue
            begin, end = asked.placed, min(asked.placed + room, len(asked.texts))
            for index in range(begin, end):
                self._place(_Text(len(asked.texts[index]), asked, index))
            asked.placed = end
            if end < len(asked.texts):
                begun.append(asked)
        self.files.extend(begun)
        for texts in (self._round, self._next):
            texts.sort(key=attrgetter("length"))

    def _place(self, text: _Text) -> None:
        if text.length >= self._length and self._joined < GROUP:
            self._round.append(text)
            self._joined += 1
        else:
            self._next.append(text)


class EmbedQueue:
    """Embeds in a thread of its own. It is always the same thread: tokenizers and kernels keep memory for each that has called
    them."""

    def __init__(self, embedder: TextEmbedder) -> None:
        self._embedder = embedder
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # by tenant, whose turn is next first
        self._works = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")

    def ask(self, texts: Sequence[str], tenant_id: str) -> Asked:
        """Have texts embedded, one at least."""
        asked = Asked(texts)
        with self._lock:
            self._lines.setdefault(tenant_id, _Line()).files.append(asked)
            if not self._works:
                self._works = True
                self._thread.submit(self._work)
        return asked

    def _work(self) -> None:
        while batch := self._next():
            try:
                self._embed([(asked, index) for asked, index in batch if asked.wanted])
            except Exception as error:  # noqa: BLE001 - who waits must be told, whatever it is
                for asked, _ in batch:
                    asked.drop()
                    if not asked.done.done():
                        asked.done.set_exception(error)

    def _next(self) -> list[tuple[Asked, int]]:
        """A batch: of the tenant whose turn it is; what that leaves room for, of the next ones."""
        with self._lock:
            batch: list[tuple[Asked, int]] = []
            while self._lines and len(batch) < BATCH:
                tenant, line = self._lines.popitem(last=False)
                batch += line.take(BATCH - len(batch))
                if line:
                    self._lines[tenant] = line
            self._works = bool(batch)
            return batch

    def _embed(self, some: Sequence[tuple[Asked, int]]) -> None:
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
