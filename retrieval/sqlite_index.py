"""Chunks in SQLite: vectors row by row and their signs in blocks, and an FTS5 table for words."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from retrieval import impacts, sign_blocks, signs, words
from retrieval.held_lists import HeldLists
from retrieval.held_vectors import HeldVectors
from retrieval.index import MOST_HITS, Generations, Hit, Row, lacking
from retrieval.rules import Rules, ids_of
from retrieval.sign_blocks import AMONG, HeldSigns, SignBlocks, Signs
from retrieval.sql import run
from storage.catalogue.engine import Catalogue
from storage.types import TextEmbedder

TABLES = (
    "CREATE TABLE index_vector_{g} (chunk_id INTEGER PRIMARY KEY, corpus_id TEXT, block INTEGER, embedding BLOB)",
    sign_blocks.TABLE,
    # Words arrive cut and normalised: the tokenizer `ascii` only splits at spaces then.
    "CREATE VIRTUAL TABLE index_words_{g} USING fts5(corpus, words, detail = column, tokenize = 'ascii tokenchars ''_''')",
)
# A deleted word leaves the file at once, not at some later merge. SQLite 3.42 and later.
ERASE = "INSERT INTO index_words_{g} (index_words_{g}, rank) VALUES ('secure-delete', 1)"
ENOUGH = 4  # times the results asked for, in candidates
BESIDES = 2  # times as many where there are rules, since some of them do not pass
SAMPLE, MANY = 64, 1 / 3  # of so many chunks the share that passes; if fewer do, all that do are listed
LOOKED_THROUGH = 6  # times as many as are wanted, one by one for whether the rules let them through
HOPELESS = 4  # times that many would have to be looked at (the nearest are of few documents, with much the same rights)


class SQLiteIndex:
    def __init__(self, catalogue: Catalogue, embedder: TextEmbedder) -> None:
        self._catalogue = catalogue
        self.generations = Generations(embedder)
        self._signs = HeldSigns(self.generations.name)
        self._vectors = HeldVectors()
        self._lists = HeldLists()

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
        SignBlocks(session, g).append(corpus_id, ids, signs.signs(vectors))
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
            SignBlocks(session, g).take_out(corpus_id, block, chunk_ids)
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
        SignBlocks(session, g).append(corpus_id, np.asarray([new for new, _ in copied], dtype="<i8"), signs.signs(vectors))
        words_of = f"SELECT :new, :word, words FROM index_words_{g} WHERE rowid = :old"
        run(session, f"INSERT INTO index_words_{g} (rowid, corpus, words) {words_of}", values)

    def lacking(self, session: Session, corpus_id: str, document_id: str | None = None) -> list[int]:
        return list(run(session, *lacking(f"index_vector_{self.generations.name}", corpus_id, document_id)).scalars())

    def dense(
        self, session: Session, corpus_ids: Sequence[str], vector: Sequence[float], k: int, rules: Rules | None = None
    ) -> list[Hit]:
        asked = np.asarray(vector, dtype="<f4")
        held = self._signs.read(session, corpus_ids)
        if not len(held.ids):
            return []
        k = min(k, MOST_HITS)
        wanted = max(ENOUGH * k, signs.EXACT if len(held.ids) <= signs.EXACT else signs.CANDIDATES)
        compared = wanted if rules is None else BESIDES * wanted
        ranked = signs.nearest(held.codes, asked, wanted)
        share = 1.0 if len(ranked) <= compared else _share(session, held.ids[ranked], rules)
        if share >= MANY:
            near, scores = self._nearest(session, held, ranked[:compared], asked)
            # Which of them pass is asked only now, from the best on: to ask costs more than to compare.
            most = len(near) if len(near) == len(held.ids) else len(near) // BESIDES
            found = _first_permitted(session, near, k, rules, most, share)
            if found is not None:
                kept = np.isin(near, found)
                return list(zip(near[kept].tolist(), scores[kept].tolist(), strict=True))
        assert rules is not None
        passing = np.flatnonzero(np.isin(held.ids, rules.all(session)))
        wanted = max(wanted, signs.EXACT)
        ranked = passing[signs.nearest(held.codes[:, passing], asked, wanted)][:wanted]
        near, scores = self._nearest(session, held, ranked, asked)
        return list(zip(near[:k].tolist(), scores[:k].tolist(), strict=True))

    def cosines(self, session: Session, chunk_ids: Sequence[int], vector: Sequence[float]) -> dict[int, float]:
        read = self._read(session, chunk_ids)
        asked = np.asarray(vector, dtype="<f4")
        scores = signs.cosines(signs.vectors(list(read.values()), len(asked)), asked)
        return dict(zip(read, scores.tolist(), strict=True))

    def _nearest(
        self, session: Session, held: Signs, places: NDArray[np.intp], vector: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The chunks at these places and their cosines, best first, of equals the one with the lower id."""
        ids, keys = held.ids[places], held.keys(places)
        vectors, known = self._vectors.get(keys, len(vector))
        if not known.all():
            read = self._read(session, ids[~known].tolist())
            new = np.flatnonzero(~known & np.isin(ids, list(read)))
            vectors[new] = signs.vectors([read[id_] for id_ in ids[new].tolist()], len(vector))
            self._vectors.put(keys[new], vectors[new])
            known[new] = True
            ids, vectors = ids[known], vectors[known]
        scores = signs.cosines(vectors, vector)
        order = np.lexsort((ids, -scores))
        return ids[order], scores[order]

    def _read(self, session: Session, chunk_ids: Sequence[int]) -> dict[int, bytes]:
        sql = f"SELECT chunk_id, embedding FROM index_vector_{self.generations.name} WHERE chunk_id {AMONG}"
        return {row[0]: row[1] for row in run(session, sql, {"ids": json.dumps(list(chunk_ids))})}

    def lexical(
        self, session: Session, corpus_ids: Sequence[str], query: str, k: int, rules: Rules | None = None
    ) -> list[Hit]:
        wanted = words.query_words(query)
        if not wanted or not corpus_ids:
            return []
        held = self._signs.read(session, corpus_ids)
        finder = _Finder(session, self.generations.name, corpus_ids, held, self._lists)
        ids, scores = impacts.rank(wanted, len(held.ids), finder)
        k = min(k, MOST_HITS)
        chosen = _permitted(session, ids, k, rules)
        if rules is not None and len(chosen) < k and finder.cut:
            # What was cut short may have held more that pass: read the lists again, without those that do not.
            finder = _Finder(session, self.generations.name, corpus_ids, held, self._lists, rules.all(session).tolist())
            ids, scores = impacts.rank(wanted, len(held.ids), finder)
            chosen = ids[:k]
        kept = np.isin(ids, chosen)
        return list(zip(ids[kept].tolist(), scores[kept].tolist(), strict=True))


class _Finder:
    """Lists of chunks for `impacts.rank`, of these corpora, and of these chunks only if `among` is given."""

    def __init__(
        self,
        session: Session,
        generation: str,
        corpus_ids: Sequence[str],
        held: Signs,
        lists: HeldLists,
        among: Sequence[int] | None = None,
    ) -> None:
        self._session, self._held, self._lists = session, held, lists
        self._corpora = " OR ".join(f'"{_corpus_word(corpus_id)}"' for corpus_id in corpus_ids)
        self._values = {} if among is None else {"ids": json.dumps(list(among))}
        self.cut = False  # whether a list was longer than what is read
        table = f"index_words_{generation}"
        # The plus sign keeps SQLite from running the text search once for each chunk of the list.
        within = "" if among is None else f"AND +rowid {AMONG}"
        # One statement for all lists, and one text for each: most of the time would go into calls and rows. The
        # interpreter's lock is free meanwhile.
        self._sql = (
            f"SELECT (SELECT group_concat(rowid) FROM (SELECT rowid FROM {table} WHERE {table} MATCH q.value {within} "
            f"LIMIT {impacts.MOST_POSTINGS + 1})) FROM json_each(:queries) q ORDER BY q.key"
        )

    def __call__(self, asked: Sequence[tuple[Sequence[str], bool]]) -> list[impacts.Ids]:
        contents = [" AND ".join(f'"{term}"{"*" if prefix else ""}' for term in terms) for terms, prefix in asked]
        found = self._held_or_read(contents) if not self._values else self._read(contents, ours=True)
        self.cut = self.cut or any(len(ids) > impacts.MOST_POSTINGS for ids in found)
        return found

    def _held_or_read(self, contents: Sequence[str]) -> list[impacts.Ids]:
        """Words change with their chunk's block: while the chunks are those of `held`, so are the lists."""
        found = self._lists.get(self._held.number, contents)
        if missing := [content for content in contents if content not in found]:
            read = dict(zip(missing, self._ours(missing), strict=True))
            self._lists.put(self._held.number, read)
            found |= read
        return [found[content] for content in contents]

    def _ours(self, contents: Sequence[str]) -> list[impacts.Ids]:
        """A list of all corpora's chunks is read in a third of the time of ours alone. Only where others' may have taken the
        place of ours, it is read again."""
        every = self._read(contents, ours=False)
        ours = self._held.holds(np.concatenate([*every, np.empty(0, dtype=np.int64)]))
        ends = np.cumsum([len(ids) for ids in every])[:-1]
        found = [ids[kept] for ids, kept in zip(every, np.split(ours, ends), strict=True)]
        crowded = [
            place
            for place, (ids, kept) in enumerate(zip(every, found, strict=True))
            if len(ids) > impacts.MOST_POSTINGS >= len(kept)
        ]
        for place, ids in zip(crowded, self._read([contents[place] for place in crowded], ours=True), strict=True):
            found[place] = ids
        return found

    def _read(self, contents: Sequence[str], ours: bool) -> list[impacts.Ids]:
        if not contents:
            return []
        corpora = f"corpus : ({self._corpora}) AND " if ours else ""
        queries = json.dumps([f"{corpora}words : ({content})" for content in contents])
        return [ids_of(found) for found in run(self._session, self._sql, {"queries": queries, **self._values}).scalars()]


def _share(session: Session, ranked: NDArray[np.int64], rules: Rules | None) -> float:
    """Of the ranked chunks, by a few all along them: the nearest may be of one topic and have its rights."""
    if rules is None:
        return 1.0
    some = np.sort(ranked[:: -(-len(ranked) // SAMPLE)])
    return len(rules.among(session, some.tolist())) / len(some)


def _permitted(session: Session, ranked: NDArray[np.int64], wanted: int, rules: Rules | None) -> NDArray[np.int64]:
    """The first `wanted` of the ranked ids that the rules let through, in their order."""
    found = _first_permitted(session, ranked, wanted, rules, min(len(ranked), LOOKED_THROUGH * wanted))
    if found is None and rules is not None:
        found = ranked[np.isin(ranked, rules.all(session))][:wanted]
    return ranked[:0] if found is None else found


def _first_permitted(
    session: Session, ranked: NDArray[np.int64], wanted: int, rules: Rules | None, most: int, share: float = 1.0
) -> NDArray[np.int64] | None:
    """The same, chunk by chunk, looking at so many at most, of which that share is expected to pass. None if so many do not
    pass that all that do are quicker to list."""
    if rules is None:
        return ranked[:wanted]
    looked, found = 0, ranked[:0]
    while len(found) < wanted and looked < most:
        # As many more as the share that has passed so far makes likely to do.
        step = int(1.2 * (wanted - len(found)) / (max(1, len(found)) / looked if looked else share))
        if step > HOPELESS * (most - looked):
            break
        some = ranked[looked : min(looked + max(step, 64), most)]
        passed = rules.among(session, np.sort(some).tolist())  # in order, since a document's chunks lie together
        found = np.concatenate([found, some[np.isin(some, passed)]])
        looked += len(some)
    return found[:wanted] if len(found) >= wanted or looked >= len(ranked) else None


def _corpus_word(corpus_id: str) -> str:
    """A corpus id as one word in lower case, without two ids ever becoming the same word."""
    return "c" + corpus_id.encode().hex()
