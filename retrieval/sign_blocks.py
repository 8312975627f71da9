"""Signs of vectors in SQLite, block by block, and in memory.

A block has a stamp: a random number, drawn anew whenever it is written. So a block in memory is the one that a snapshot
has if and only if the stamps agree, whoever wrote it, and a search reads from the database only what has changed.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from retrieval.sql import run

TABLE = """CREATE TABLE index_signs_{g} (corpus_id TEXT, block INTEGER, chunks INTEGER, stamp INTEGER, ids BLOB, signs BLOB,
    PRIMARY KEY (corpus_id, block))"""
BLOCK = 1024  # vectors
MOST_BYTES = 256 << 20  # of signs and ids in memory: four million chunks of 384 components
AMONG = "IN (SELECT value FROM json_each(:ids))"

Block = tuple[NDArray[np.int64], NDArray[np.uint64], int]  # its ids, its codes, its number in this process


@dataclass(frozen=True)
class Signs:
    """Of all chunks of some corpora: ids [n] and codes [words, n], a row for each word, so that comparing runs through
    memory in order. `stamps` and `numbers` are the blocks' and `ends` where they end. `number` is this object's own."""

    number: int
    stamps: tuple[int, ...]
    numbers: tuple[int, ...]
    ends: tuple[int, ...]
    ids: NDArray[np.int64]
    codes: NDArray[np.uint64]

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        return np.sort(self.ids)

    def holds(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the ids are among ours."""
        if not len(self.ids):
            return np.zeros(len(ids), dtype=bool)
        place = np.minimum(np.searchsorted(self._sorted, ids), len(self.ids) - 1)
        found: NDArray[np.bool_] = self._sorted[place] == ids
        return found

    @cached_property
    def _keys(self) -> NDArray[np.int64]:
        """Of each block: what is added to a place in `ids` to make its key."""
        begins = np.array((0, *self.ends[:-1]), dtype=np.int64)
        return BLOCK * np.array(self.numbers, dtype=np.int64) - begins

    def keys(self, places: NDArray[np.intp]) -> NDArray[np.int64]:
        """Of what lies at these places in `ids`: a number that stands for this chunk with this vector, and is no other's in
        this process."""
        keys: NDArray[np.int64] = self._keys[np.searchsorted(self.ends, places, side="right")] + places
        return keys

    @property
    def bytes(self) -> int:
        return 2 * self.ids.nbytes + self.codes.nbytes

    def blocks(self) -> Iterator[tuple[int, Block]]:
        for stamp, number, begin, end in zip(self.stamps, self.numbers, (0, *self.ends), self.ends, strict=False):
            yield stamp, (self.ids[begin:end], self.codes[:, begin:end], number)


class HeldSigns:
    """Signs in memory, of the corpora that were searched last. Threads may share it."""

    def __init__(self, generation: str) -> None:
        self._table = f"index_signs_{generation}"
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._held: OrderedDict[tuple[str, ...], Signs] = OrderedDict()

    def read(self, session: Session, corpus_ids: Sequence[str]) -> Signs:
        """What the session's snapshot holds."""
        key = tuple(corpus_ids)
        corpora = {"corpora": json.dumps(key)}
        within = "WHERE corpus_id IN (SELECT value FROM json_each(:corpora))"
        stamps = run(session, f"SELECT stamp FROM {self._table} {within} ORDER BY corpus_id, block", corpora).scalars().all()
        with self._lock:
            held = self._held.get(key)
            if held:
                self._held.move_to_end(key)
        if held and held.stamps == tuple(stamps):
            return held
        known = dict(held.blocks()) if held else {}
        missing = {"ids": json.dumps([stamp for stamp in stamps if stamp not in known])}
        rows = run(session, f"SELECT stamp, ids, signs FROM {self._table} {within} AND stamp {AMONG}", corpora | missing)
        for stamp, ids, codes in rows:
            held_ids, held_codes = _block(ids, codes)
            known[stamp] = (held_ids, held_codes.T, next(self._numbers))
        found = _joined(next(self._numbers), [(stamp, known[stamp]) for stamp in stamps])
        self._keep(key, found)
        return found

    def _keep(self, key: tuple[str, ...], signs: Signs) -> None:
        with self._lock:
            self._held[key] = signs
            self._held.move_to_end(key)
            while self._held and sum(each.bytes for each in self._held.values()) > MOST_BYTES:
                self._held.popitem(last=False)


def _joined(number: int, blocks: Sequence[tuple[int, Block]]) -> Signs:
    if not blocks:
        return Signs(number, (), (), (), np.empty(0, dtype=np.int64), np.empty((1, 0), dtype=np.uint64))
    return Signs(
        number,
        tuple(stamp for stamp, _ in blocks),
        tuple(number for _, (_, _, number) in blocks),
        tuple(np.cumsum([len(ids) for _, (ids, _, _) in blocks]).tolist()),
        np.concatenate([ids for _, (ids, _, _) in blocks]),
        np.ascontiguousarray(np.concatenate([codes for _, (_, codes, _) in blocks], axis=1)),
    )


def _block(ids: bytes, codes: bytes) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """As stored: codes [n, words]."""
    numbers = np.frombuffer(ids, dtype="<i8")
    return numbers, np.frombuffer(codes, dtype="<u8").reshape(len(numbers), -1)


class SignBlocks:
    """Writes blocks in the caller's transaction: vectors behind the newest block of their corpus."""

    def __init__(self, session: Session, generation: str) -> None:
        self._session = session
        self._table = f"index_signs_{generation}"
        self._vectors = f"index_vector_{generation}"

    def append(self, corpus_id: str, ids: NDArray[np.int64], codes: NDArray[np.uint64]) -> None:
        """ids [n], codes [n, words]."""
        newest = run(
            self._session,
            f"SELECT block, ids, signs FROM {self._table} WHERE corpus_id = :c ORDER BY block DESC LIMIT 1",
            {"c": corpus_id},
        ).first()
        block = newest[0] if newest else 0
        held, known = (newest[1], newest[2]) if newest else (b"", b"")
        while len(ids):
            room = BLOCK - len(held) // 8
            if room <= 0:
                block, held, known, room = block + 1, b"", b"", BLOCK
            held, known = held + ids[:room].tobytes(), known + codes[:room].tobytes()
            self._write(corpus_id, block, held, known)
            self._place(ids[:room], block)
            ids, codes = ids[room:], codes[room:]

    def take_out(self, corpus_id: str, block: int, chunk_ids: Sequence[int]) -> None:
        """Remove chunks from a block. What is left of one that is mostly empty moves to the newest."""
        at = {"c": corpus_id, "b": block}
        found = run(self._session, f"SELECT ids, signs FROM {self._table} WHERE corpus_id = :c AND block = :b", at).one()
        ids, codes = _block(found[0], found[1])
        kept = ~np.isin(ids, np.asarray(chunk_ids, dtype=np.int64))
        ids, codes = ids[kept], codes[kept]
        newest = run(self._session, f"SELECT max(block) FROM {self._table} WHERE corpus_id = :c", {"c": corpus_id}).scalar()
        if len(ids) >= BLOCK // 4 or (len(ids) and block == newest):
            self._write(corpus_id, block, ids.tobytes(), codes.tobytes())
            return
        run(self._session, f"DELETE FROM {self._table} WHERE corpus_id = :c AND block = :b", at)
        if len(ids):
            self.append(corpus_id, ids, codes)

    def _write(self, corpus_id: str, block: int, ids: bytes, codes: bytes) -> None:
        run(
            self._session,
            f"INSERT OR REPLACE INTO {self._table} VALUES (:c, :b, :n, random(), :ids, :signs)",
            {"c": corpus_id, "b": block, "n": len(ids) // 8, "ids": ids, "signs": codes},
        )

    def _place(self, ids: NDArray[np.int64], block: int) -> None:
        run(
            self._session,
            f"UPDATE {self._vectors} SET block = :b WHERE chunk_id {AMONG}",
            {"b": block, "ids": json.dumps(ids.tolist())},
        )
