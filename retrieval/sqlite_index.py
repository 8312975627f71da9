"""Chunks in SQLite: vectors row by row and their signs in blocks, and an FTS5 table for words."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from retrieval import impacts, signs, words
from retrieval.index import MOST_HITS, Generations, Hit, Row, lacking, run
from retrieval.rules import Rules, ids_of
from storage.catalogue.engine import Catalogue
from storage.types import TextEmbedder

TABLES = (
    "CREATE TABLE index_vector_{g} (chunk_id INTEGER PRIMARY KEY, corpus_id TEXT, block INTEGER, embedding BLOB)",
    """CREATE TABLE index_signs_{g} (corpus_id TEXT, block INTEGER, chunks INTEGER, ids BLOB, signs BLOB,
    PRIMARY KEY (corpus_id, block))""",
    # Words arrive cut and normalised: the tokenizer `ascii` only splits at spaces then.
    "CREATE VIRTUAL TABLE index_words_{g} USING fts5(corpus, words, detail = column, tokenize = 'ascii tokenchars ''_''')",
)
# A deleted word leaves the file at once, not at some later merge. SQLite 3.42 and later.
ERASE = "INSERT INTO index_words_{g} (index_words_{g}, rank) VALUES ('secure-delete', 1)"
BLOCK = 1024  # vectors, whose signs lie together: a search reads whole blocks
ENOUGH = 4  # times the results asked for, in candidates that the rules let through
LOOKED_THROUGH = 6  # times as many as are wanted, one by one for whether the rules let them through
AMONG = "IN (SELECT value FROM json_each(:ids))"


class SQLiteIndex:
    def __init__(self, catalogue: Catalogue, embedder: TextEmbedder) -> None:
        self._catalogue = catalogue
        self.generations = Generations(embedder)

    def ensure(self) -> None:
        with self._catalogue.read() as session:
            if self.generations.known(session):
                return
        with self._catalogue.write() as session:
            if not self.generations.register(session):
                return
            version = str(run(session, "SELECT sqlite_version()").scalar())
            erase = [ERASE] if tuple(map(int, version.split("."))) >= (3, 42) else []
            for statement in (*TABLES, *erase):
                run(session, statement.format(g=self.generations.name))

    def add(self, session: Session, corpus_id: str, rows: Sequence[Row]) -> None:
        self.generations.require(session, corpus_id)
        self.stage(session, corpus_id, rows)

    def stage(self, session: Session, corpus_id: str, rows: Sequence[Row]) -> None:
        if not rows:
            return
        g = self.generations.name
        vectors = np.asarray([vector for _, vector, _ in rows], dtype="<f4")
        ids = np.asarray([id_ for id_, _, _ in rows], dtype="<i8")
        run(
            session,
            f"INSERT INTO index_vector_{g} (chunk_id, corpus_id, embedding) VALUES (:id, :corpus, :vector)",
            [{"id": int(id_), "corpus": corpus_id, "vector": v.tobytes()} for id_, v in zip(ids, vectors, strict=True)],
        )
        _Blocks(session, g).append(corpus_id, ids, signs.signs(vectors))
        run(
            session,
            f"INSERT INTO index_words_{g} (rowid, corpus, words) VALUES (:id, :corpus, :words)",
            [
                {"id": id_, "corpus": _corpus_word(corpus_id), "words": " ".join(impacts.terms(words.words(content)))}
                for id_, _, content in rows
            ],
        )

    def remove(self, session: Session, chunk_ids: Sequence[int]) -> None:
        for generation in self.generations.all(session):
            self._remove(session, generation, chunk_ids)

    def drop(self, session: Session, corpus_id: str, generation: str, most: int) -> int:
        sql = f"SELECT chunk_id FROM index_vector_{generation} WHERE corpus_id = :c LIMIT :most"
        held = list(run(session, sql, {"c": corpus_id, "most": most}).scalars())
        self._remove(session, generation, held)
        return len(held)

    def _remove(self, session: Session, g: str, chunk_ids: Sequence[int]) -> None:
        ids = {"ids": json.dumps(list(chunk_ids))}
        touched = run(
            session, f"SELECT DISTINCT corpus_id, block FROM index_vector_{g} WHERE chunk_id {AMONG}", ids
        ).all()
        for corpus_id, block in touched:
            _Blocks(session, g).take_out(corpus_id, block, chunk_ids)
        run(session, f"DELETE FROM index_vector_{g} WHERE chunk_id {AMONG}", ids)
        run(session, f"DELETE FROM index_words_{g} WHERE rowid {AMONG}", ids)

    def copy(self, session: Session, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        for generation in self.generations.all(session):
            self._copy(session, generation, pairs, corpus_id)

    def _copy(self, session: Session, g: str, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        sql = f"SELECT chunk_id, embedding FROM index_vector_{g} WHERE chunk_id {AMONG}"
        held = {row[0]: row[1] for row in run(session, sql, {"ids": json.dumps([old for old, _ in pairs])})}
        copied = [(new, old) for old, new in pairs if old in held]
        if not copied:
            return
        place = {"corpus": corpus_id, "word": _corpus_word(corpus_id)}
        values = [{"new": new, "old": old, "vector": held[old], **place} for new, old in copied]
        run(session, f"INSERT INTO index_vector_{g} (chunk_id, corpus_id, embedding) VALUES (:new, :corpus, :vector)", values)
        vectors = np.stack([np.frombuffer(held[old], dtype="<f4") for _, old in copied])
        _Blocks(session, g).append(corpus_id, np.asarray([new for new, _ in copied], dtype="<i8"), signs.signs(vectors))
        words_of = f"SELECT :new, :word, words FROM index_words_{g} WHERE rowid = :old"
        run(session, f"INSERT INTO index_words_{g} (rowid, corpus, words) {words_of}", values)

    def lacking(self, session: Session, corpus_id: str, document_id: str | None = None) -> list[int]:
        return list(run(session, *lacking(f"index_vector_{self.generations.name}", corpus_id, document_id)).scalars())

    def dense(
        self, session: Session, corpus_ids: Sequence[str], vector: Sequence[float], k: int, rules: Rules | None = None
    ) -> list[Hit]:
        asked = np.asarray(vector, dtype="<f4")
        ids, codes = _Blocks(session, self.generations.name).read(corpus_ids)
        if not len(ids):
            return []
        ranked = ids[signs.nearest(codes, asked)]
        candidates = _permitted(session, ranked, max(signs.CANDIDATES, ENOUGH * k), rules)
        rows = run(
            session,
            f"SELECT chunk_id, embedding FROM index_vector_{self.generations.name} WHERE chunk_id {AMONG}",
            {"ids": json.dumps(candidates.tolist())},
        ).all()
        if not rows:
            return []
        held = np.asarray([row[0] for row in rows])
        scores = signs.cosines([row[1] for row in rows], asked)
        order = np.lexsort((held, -scores))[: min(k, MOST_HITS)]
        return [(int(held[i]), float(scores[i])) for i in order]

    def cosines(self, session: Session, chunk_ids: Sequence[int], vector: Sequence[float]) -> dict[int, float]:
        sql = f"SELECT chunk_id, embedding FROM index_vector_{self.generations.name} WHERE chunk_id {AMONG}"
        rows = run(session, sql, {"ids": json.dumps(list(chunk_ids))}).all()
        near = signs.cosines([row[1] for row in rows], np.asarray(vector, dtype="<f4"))
        return {int(row[0]): float(cosine) for row, cosine in zip(rows, near, strict=True)}

    def lexical(
        self, session: Session, corpus_ids: Sequence[str], query: str, k: int, rules: Rules | None = None
    ) -> list[Hit]:
        wanted = words.query_words(query)
        if not wanted or not corpus_ids:
            return []
        chunks = _Blocks(session, self.generations.name).count(corpus_ids)
        finder = _Finder(session, self.generations.name, corpus_ids)
        ids, scores = impacts.rank(wanted, chunks, finder)
        k = min(k, MOST_HITS)
        chosen = _permitted(session, ids, k, rules)
        if rules is not None and len(chosen) < k and finder.cut:
            # What was cut short may have held more that pass: read the lists again, without those that do not.
            finder = _Finder(session, self.generations.name, corpus_ids, rules.all(session).tolist())
            ids, scores = impacts.rank(wanted, chunks, finder)
            chosen = ids[:k]
        held = set(chosen.tolist())
        return [(int(id_), float(score)) for id_, score in zip(ids, scores, strict=True) if int(id_) in held]


class _Finder:
    """Lists of chunks for `impacts.rank`, of these corpora, and of these chunks only if `among` is given."""

    def __init__(self, session: Session, generation: str, corpus_ids: Sequence[str], among: Sequence[int] | None = None):
        self._session = session
        self._corpora = " OR ".join(f'"{_corpus_word(corpus_id)}"' for corpus_id in corpus_ids)
        self._values = {} if among is None else {"ids": json.dumps(list(among))}
        self.cut = False  # whether a list was longer than what is read
        table = f"index_words_{generation}"
        # The plus sign keeps SQLite from running the text search once for each chunk of the list.
        within = "" if among is None else f"AND +rowid {AMONG}"
        # One text instead of a row for each chunk: most of the time would go into rows.
        self._sql = (
            f"SELECT group_concat(rowid) FROM (SELECT rowid FROM {table} WHERE {table} MATCH :query {within} "
            f"LIMIT {impacts.MOST_POSTINGS + 1})"
        )

    def __call__(self, terms: Sequence[str], prefix: bool) -> impacts.Ids:
        content = " AND ".join(f'"{term}"{"*" if prefix else ""}' for term in terms)
        query = f"corpus : ({self._corpora}) AND words : ({content})"
        found = run(self._session, self._sql, {"query": query, **self._values}).scalar()
        ids = ids_of(found)
        self.cut = self.cut or len(ids) > impacts.MOST_POSTINGS
        return ids


def _permitted(session: Session, ranked: NDArray[np.int64], wanted: int, rules: Rules | None) -> NDArray[np.int64]:
    """The first `wanted` of the ranked ids that the rules let through, in their order."""
    if rules is None:
        return ranked[:wanted]
    looked, most = 0, min(len(ranked), LOOKED_THROUGH * wanted)
    found = ranked[:0]
    while len(found) < wanted and looked < most:
        # As many more as the share that has passed so far makes likely to do.
        step = wanted if not looked else int(1.2 * (wanted - len(found)) * looked / max(1, len(found)))
        some = ranked[looked : looked + max(step, 64)]
        if looked and len(some) > most - looked:
            break  # most do not pass: all that do are quicker to list
        found = np.concatenate([found, some[np.isin(some, rules.among(session, some.tolist()))]])
        looked += len(some)
    if len(found) >= wanted or looked >= len(ranked):
        return found[:wanted]
    return ranked[np.isin(ranked, rules.all(session))][:wanted]


class _Blocks:
    """Signs of a corpus's vectors, block by block. Vectors are written behind the newest block."""

    def __init__(self, session: Session, generation: str) -> None:
        self._session = session
        self._table = f"index_signs_{generation}"
        self._vectors = f"index_vector_{generation}"

    def read(self, corpus_ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Chunk ids [n] and codes [n, words]."""
        sql = f"SELECT ids, signs FROM {self._table} WHERE corpus_id {AMONG} ORDER BY corpus_id, block"
        rows = run(self._session, sql, {"ids": json.dumps(list(corpus_ids))}).all()
        ids = np.frombuffer(b"".join(row[0] for row in rows), dtype="<i8")
        codes = np.frombuffer(b"".join(row[1] for row in rows), dtype="<u8")
        return ids, codes.reshape(len(ids), -1) if len(ids) else codes.reshape(0, 1)

    def count(self, corpus_ids: Sequence[str]) -> int:
        sql = f"SELECT sum(chunks) FROM {self._table} WHERE corpus_id {AMONG}"
        return int(run(self._session, sql, {"ids": json.dumps(list(corpus_ids))}).scalar() or 0)

    def append(self, corpus_id: str, ids: NDArray[np.int64], codes: NDArray[np.uint64]) -> None:
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
        ids = np.frombuffer(found[0], dtype="<i8")
        codes = np.frombuffer(found[1], dtype="<u8").reshape(len(ids), -1)
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
            f"INSERT OR REPLACE INTO {self._table} VALUES (:c, :b, :n, :ids, :signs)",
            {"c": corpus_id, "b": block, "n": len(ids) // 8, "ids": ids, "signs": codes},
        )

    def _place(self, ids: NDArray[np.int64], block: int) -> None:
        run(
            self._session,
            f"UPDATE {self._vectors} SET block = :b WHERE chunk_id {AMONG}",
            {"b": block, "ids": json.dumps(ids.tolist())},
        )


def _corpus_word(corpus_id: str) -> str:
    """A corpus id as one word in lower case, without two ids ever becoming the same word."""
    return "c" + corpus_id.encode().hex()
