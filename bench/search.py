"""How long does a search take in a large corpus, and where?

A corpus is made straight in the catalogue and the index: words by Zipf's law, vectors in clusters (documents
within topics), half of the documents behind access lists, attributes on all. Questions hold frequent and rare words. The
query is embedded by the real model; since texts of made-up words mean nothing, a vector near a document stands in for
what it gives. Stages are in milliseconds of their thread's CPU time, which a busy machine does not change much; the
whole is given by the wall clock too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from sqlalchemy import insert

from bench.harness import console, emptied, write_record
from retrieval.ask import Stages
from retrieval.embedder import SentenceEmbedder
from retrieval.index import ChunkIndex, open_index
from retrieval.rules import Rules
from retrieval.search import Retriever
from storage.catalogue.engine import Catalogue, migrate, open_catalogue
from storage.catalogue.schema import ChunkRow, Corpus, Document, Tenant

TENANT, CORPUS = "bench", "vs_bench"
PER_DOCUMENT, WORDS, TOKENS, VOCABULARY = 5, 180, 260, 50_000
AT_ONCE = 200  # documents in a transaction
TOPICS = 200
TEAMS, PRINCIPALS = 20, ["user1", "group:3"]
CASES: dict[str, dict[str, Any]] = {
    "open documents and those of the asker": {},
    "with a filter (1 in 20)": {"filters": {"type": "eq", "key": "team", "value": "team3"}},
    "with a filter (4 in 5)": {"filters": {"type": "gte", "key": "year", "value": 2005}},
    "with two filters (1 in 500)": {
        "filters": {
            "type": "and",
            "filters": [{"type": "eq", "key": "team", "value": "team3"}, {"type": "eq", "key": "year", "value": 2003}],
        }
    },
}


def run(
    *, chunks: int, questions: int, database: str, out: Path | None, workdir: Path, dtype: str = "bfloat16", seed: int = 0
) -> dict[str, Any]:
    """`database`: a catalogue's URL; empty: SQLite in the workdir. The corpus is made anew."""
    folder = emptied(workdir / "search")
    url = database or f"sqlite:///{folder / 'catalogue.db'}"
    migrate(url)
    catalogue = open_catalogue(url)
    embedder = SentenceEmbedder(dtype=dtype)
    index = open_index(catalogue, embedder)
    index.ensure()
    made = _Corpus(np.random.default_rng(seed), embedder.dimensions)
    begun = time.perf_counter()
    for first in range(0, chunks // PER_DOCUMENT, AT_ONCE):
        made.write(catalogue, index, first, min(AT_ONCE, chunks // PER_DOCUMENT - first))
    built = time.perf_counter() - begun
    record: dict[str, Any] = {
        "chunks": chunks, "database": catalogue.dialect, "seconds_to_index": round(built, 1), "dtype": dtype,
    }  # fmt: skip
    record["cases"] = {
        name: _measured(catalogue, index, embedder, made, questions, options) for name, options in CASES.items()
    }
    _show(record)
    write_record(record, out)
    catalogue.close()
    return record


class _Corpus:
    def __init__(self, rng: np.random.Generator, dimensions: int) -> None:
        self._rng, self._dimensions = rng, dimensions
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        self._words = np.array(["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(VOCABULARY)])
        shares = 1 / np.arange(1, VOCABULARY + 1) ** 1.05
        self._until = np.cumsum(shares / shares.sum())
        self._topics = [self._unit(np.zeros(dimensions, dtype="<f4"), 1.0) for _ in range(TOPICS)]
        self.centres: list[NDArray[np.float32]] = []

    def words(self, count: int, rarest: float = 1.0) -> list[str]:
        found = np.searchsorted(self._until, self._rng.random(count) * rarest)
        return [str(word) for word in self._words[found]]

    def question(self) -> str:
        """Six words as frequent as a text's, and four that are rarer than its first fifty."""
        rare = self._words[self._rng.integers(50, 5000, 4)]
        return " ".join([*self.words(6), *map(str, rare)])

    def near_a_document(self) -> NDArray[np.float32]:
        return self._unit(self.centres[self._rng.integers(len(self.centres))], 0.8)

    def _unit(self, centre: NDArray[np.float32], spread: float) -> NDArray[np.float32]:
        noise = self._rng.standard_normal(self._dimensions).astype("<f4") / self._dimensions**0.5
        vector = centre + spread * noise
        unit: NDArray[np.float32] = (vector / np.linalg.norm(vector)).astype("<f4")
        return unit

    def write(self, catalogue: Catalogue, index: ChunkIndex, first: int, count: int) -> None:
        documents, rows = [], []
        for number in range(first, first + count):
            documents.append(_document(number))
            self.centres.append(self._unit(self._topics[number % TOPICS], 0.8))
            rows += [self._chunk(number, ordinal) for ordinal in range(PER_DOCUMENT)]
        with catalogue.write() as session:
            if first == 0:
                _corpus_row(session)
            session.execute(insert(Document), documents)
            session.execute(insert(ChunkRow), rows)
            entries = [(row["id"], self._unit(self.centres[_of(row)], 1.0).tolist(), row["text"]) for row in rows]
            index.add(session, CORPUS, entries)

    def _chunk(self, document: int, ordinal: int) -> dict[str, Any]:
        return {
            "id": document * PER_DOCUMENT + ordinal + 1, "document_id": f"doc-{document:07}", "corpus_id": CORPUS,
            "tenant_id": TENANT, "ordinal": ordinal, "text": " ".join(self.words(WORDS)), "start": ordinal * 1000,
            "end": ordinal * 1000 + 1000, "headings": ["Part", "Section"], "line_start": 1, "line_end": 9,
            "token_ids": self._rng.integers(0, 49_000, TOKENS, dtype="u4").tobytes(),
        }  # fmt: skip


def _of(row: dict[str, Any]) -> int:
    return int((row["id"] - 1) // PER_DOCUMENT)


def _corpus_row(session: Any) -> None:
    session.add(Tenant(id=TENANT, name=TENANT, created_at=0.0))
    session.flush()
    corpus = {"id": CORPUS, "tenant_id": TENANT, "name": CORPUS, "sharing_group": TENANT, "attributes": {}}
    session.add(Corpus(**corpus, source=None, created_at=0.0, last_active_at=0.0))
    session.flush()


def _document(number: int) -> dict[str, Any]:
    access = None if number % 2 else [f"user{number % 7}", f"group:{number % 50}"]
    attributes = {"team": f"team{number % TEAMS}", "year": 2000 + number % 25, "kind": "policy"}
    return {
        "id": f"doc-{number:07}", "corpus_id": CORPUS, "tenant_id": TENANT, "file_id": "file", "path": f"{number}.txt",
        "sha256": "0" * 64, "status": "completed", "access": access, "attributes": attributes, "created_at": 0.0,
        "generation": 1, "usage_bytes": 0,
    }  # fmt: skip


def _measured(
    catalogue: Catalogue,
    index: ChunkIndex,
    embedder: SentenceEmbedder,
    made: _Corpus,
    questions: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    near = _Nearby(embedder, made)
    judge = open_index(catalogue, embedder)  # leaves nothing in the memory of the one that is searched
    retriever = Retriever(catalogue, index, near)
    stages: list[dict[str, float]] = []
    totals: list[float] = []
    cpu: list[float] = []
    recall: list[float] = []
    for number in range(-3, questions):  # three to warm up
        question, watch = made.question(), Stages(clock=time.thread_time)
        begun, worked = time.perf_counter(), time.process_time()
        found = retriever.search(
            tenant_id=TENANT, corpus_ids=[CORPUS], query=question, top_k=8, principals=PRINCIPALS, stages=watch, **options
        )
        if number >= 0:
            totals.append(1000 * (time.perf_counter() - begun))
            cpu.append(1000 * (time.process_time() - worked))
            stages.append(watch.ms)
            recall.append(near.recall(catalogue, judge, options))
        assert found
    return {
        "p50_ms": round(statistics.median(totals), 1),
        "p95_ms": round(float(np.quantile(totals, 0.95)), 1),
        "cpu_p50_ms": round(statistics.median(cpu), 1),
        "stages_cpu_p50_ms": {name: round(statistics.median(s.get(name, 0.0) for s in stages), 1) for name in stages[0]},
        "dense_recall_at_8": round(statistics.mean(recall), 4),
    }


class _Nearby:
    """The real embedder, whose vectors make way for ones near a document after they have been computed."""

    def __init__(self, embedder: SentenceEmbedder, made: _Corpus) -> None:
        self._embedder, self._made = embedder, made
        self.identity, self.dimensions, self.max_tokens = embedder.identity, embedder.dimensions, embedder.max_tokens
        self.last: list[float] = []

    def count_tokens(self, text: str) -> int:
        return self._embedder.count_tokens(text)

    def count_batch(self, texts: Sequence[str]) -> Sequence[int]:
        return self._embedder.count_batch(texts)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        self._embedder.embed(texts)
        self.last = self._made.near_a_document().tolist()
        return [self.last]

    def recall(self, catalogue: Catalogue, index: ChunkIndex, options: dict[str, Any]) -> float:
        """Of the eight nearest that the asker may see, the share among the first eight of the index."""
        rules = Rules(TENANT, (CORPUS,), frozenset(PRINCIPALS), options.get("filters"))
        with catalogue.read() as session:
            few = index.dense(session, [CORPUS], self.last, 8, rules)
            most = index.dense(session, [CORPUS], self.last, 2048, rules)  # eight times as many candidates
        best = {id_ for id_, _ in most[:8]}
        return len(best & {id_ for id_, _ in few}) / max(1, len(best))


def _show(record: dict[str, Any]) -> None:
    table = Table(title=f"{record['chunks']} chunks in {record['database']}, ms; stages in CPU time", title_justify="left")
    names = ["embed", "rules", "dense", "lexical", "rows", "confirm"]
    for name in ("search", "p50", "p95", "CPU p50", *names, "recall of dense"):
        table.add_column(name, justify="left" if name == "search" else "right")
    for name, case in record["cases"].items():
        cells = [str(case[figure]) for figure in ("p50_ms", "p95_ms", "cpu_p50_ms")]
        cells += [str(case["stages_cpu_p50_ms"].get(stage, "")) for stage in names]
        table.add_row(name, *cells, f"{case['dense_recall_at_8']:.3f}")
    console().print(table)
