"""From a question to the chunks that answer it, within the asker's rights.

Fusion is reciprocal rank fusion with k = 60 (Cormack, Clarke and Büttcher, SIGIR 2009): it needs no
calibration between cosine and word scores, whose scales differ by corpus and by database. A fused score is
only an order. What a chunk's score says, from 0 to 1, is how much it has to do with the query (`retrieval/relevance.py`), or what
the reranker says of it. Where no reranker has ordered them, scores need not fall from one chunk to the next.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from retrieval import filters as attribute_filters
from retrieval.index import MOST_HITS, ChunkIndex, Generations, Hit, owned_corpora
from retrieval.neighbours import with_neighbours
from retrieval.relevance import relevance
from retrieval.reranker import Reranker
from retrieval.rules import Rules
from retrieval.versions import PastRules, kept_rows
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow, Document
from storage.catalogue.versions import check_kept, current_then, past_of
from storage.errors import UserError
from storage.tracing import span
from storage.types import RetrievedChunk, TextEmbedder, indexed_text

Mode = Literal["hybrid", "dense", "lexical"]
RRF_K = 60
MOST_RESULTS = 500
CACHED_QUERIES = 256
RERANKED = 32
SEARCHES = 3  # at most, when documents change while we look
BESIDE = 2  # searches by words that run beside the one by meaning, on another core
FOUND = (
    ChunkRow.id, ChunkRow.ordinal, ChunkRow.text, ChunkRow.token_ids, ChunkRow.start, ChunkRow.end, ChunkRow.headings,
    ChunkRow.page_start, ChunkRow.page_end, ChunkRow.line_start, ChunkRow.line_end, ChunkRow.kv_key,
    Document.id.label("document_id"), Document.tenant_id, Document.corpus_id, Document.file_id, Document.path,
    Document.sha256, Document.access, Document.attributes, Document.codec, Document.not_stored,
)  # fmt: skip
STILL = (
    ChunkRow.id, ChunkRow.token_ids, Document.id.label("document_id"), Document.tenant_id, Document.corpus_id,
    Document.access, Document.attributes,
)  # fmt: skip


@dataclass
class Stages:
    """Milliseconds by stage of a search: embed, rules, dense, lexical, rows, confirm. `lexical` may run beside `embed` and
    `dense`: `clock` may be `time.thread_time`."""

    ms: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        begun = self.clock()
        with span(f"retrieval.{name}"):
            yield
        self.ms[name] = self.ms.get(name, 0.0) + 1000 * (self.clock() - begun)


@dataclass(frozen=True)
class Ask:
    """One search, checked."""

    rules: Rules
    query: str
    mode: Mode
    top_k: int
    token_budget: int | None
    score_threshold: float | None
    stages: Stages
    neighbours: bool
    as_of: float | None = None  # see retrieval.versions
    rerank: bool = True


class Retriever:
    """Searches one catalogue. Threads may share it."""

    def __init__(
        self, catalogue: Catalogue, index: ChunkIndex, embedder: TextEmbedder, reranker: Reranker | None = None
    ) -> None:
        """With a reranker the best of what both searches found are put in its order, and have its scores."""
        self._catalogue = catalogue
        self._reranker = reranker
        self._index = index
        self._generations = Generations(embedder)
        self._vectors = _QueryVectors(embedder)
        self._beside = ThreadPoolExecutor(BESIDE, thread_name_prefix="words")
        self._free = threading.Semaphore(BESIDE)

    def search(
        self,
        *,
        tenant_id: str,
        corpus_ids: Sequence[str],
        query: str,
        top_k: int,
        token_budget: int | None = None,
        principals: Collection[str] | None = None,
        filters: Mapping[str, Any] | None = None,
        mode: Mode = "hybrid",
        score_threshold: float | None = None,
        neighbours: bool = False,
        as_of: float | None = None,
        stages: Stages | None = None,
        rerank: bool = True,
    ) -> list[RetrievedChunk]:
        """The best chunks, best first; `as_of` a time (seconds since the epoch), of what was current then. Without
        principals only documents without an access list are seen.

        `neighbours`: what is left of the token budget goes to the chunks beside those found, in the same section. Corpora
        that are not the tenant's are passed over like corpora that do not exist. UserError(code="reindex_required") if a
        corpus was indexed with another embedding model.
        """
        _check(query, top_k, token_budget, mode)
        attribute_filters.check(filters)
        stages = stages or Stages()
        rules = Rules(tenant_id, tuple(dict.fromkeys(corpus_ids)), frozenset(principals or ()), filters)
        if as_of is not None:
            rules = PastRules(**vars(rules), as_of=as_of)
        ask = Ask(
            rules=rules,
            query=query,
            mode=mode,
            top_k=top_k,
            token_budget=token_budget,
            score_threshold=score_threshold,
            stages=stages,
            neighbours=neighbours and as_of is None,
            as_of=as_of,
            rerank=rerank,
        )
        with span("retrieval.search", {"preread.mode": mode, "preread.top_k": top_k}) as whole:
            found = self._settled(ask)
            whole.set_attribute("preread.chunks", len(found))
        return found

    def _settled(self, ask: Ask) -> list[RetrievedChunk]:
        """Search in one snapshot, then look at the final list again in a newer one.

        If something vanished meanwhile (deleted, replaced by a new generation, closed to the asker), search
        again, so that the answer has what replaced it.
        """
        for _ in range(SEARCHES):
            with self._catalogue.read() as session:
                found = self._ranked(session, ask)
            with ask.stages.of("confirm"), self._catalogue.read() as session:
                kept = _confirmed(session, ask, found)
            if len(kept) == len(found):
                break
        return kept

    def _ranked(self, session: Session, ask: Ask) -> list[RetrievedChunk]:
        with ask.stages.of("rules"):
            corpora = owned_corpora(session, self._generations, ask.rules.tenant_id, ask.rules.corpora)
            if ask.as_of is not None:
                check_kept(session, corpora, ask.as_of)
            ask = replace(ask, rules=replace(ask.rules, corpora=tuple(corpora)))
            rules = ask.rules if corpora and ask.rules.needed(session) else None
        if not corpora:
            return []
        if ask.as_of is not None:
            corpora = [*corpora, *map(past_of, corpora)]
        depth = max(50, 4 * ask.top_k)
        while True:  # deeper only if duplicates or the budget ate what was found
            lists = self._lists(session, ask, corpora, rules, depth)
            hits = self._reranked(session, ask, self._scored(session, ask, lists))
            with ask.stages.of("rows"):
                chosen = _choose(_rows_in_order(session, ask, hits), ask)
            exhausted = all(len(hits) < depth or hits[-1][1] < (ask.score_threshold or 0) for hits in lists)
            if len(chosen) >= ask.top_k or exhausted or depth >= MOST_HITS or ask.token_budget is not None:
                return self._joined(session, ask, chosen)
            depth = min(8 * depth, MOST_HITS)

    def _scored(self, session: Session, ask: Ask, lists: list[list[Hit]]) -> list[Hit]:
        """In the order of fusion, each with its relevance."""
        order = [chunk_id for chunk_id, _ in fuse(lists)]
        near: dict[int, float] = {}
        if ask.mode != "lexical":
            near = dict(lists[0])
            if others := [chunk_id for chunk_id in order if chunk_id not in near]:
                near |= self._index.cosines(session, others, self._vectors.get(ask.query))
        worded = dict(lists[-1]) if ask.mode != "dense" else {}
        return [(chunk_id, relevance(near.get(chunk_id), worded.get(chunk_id, 0.0))) for chunk_id in order]

    def _reranked(self, session: Session, ask: Ask, hits: list[Hit]) -> list[Hit]:
        """The first of the hits in the reranker's order; the others are left out, since they have no score of its kind."""
        if self._reranker is None or not ask.rerank:
            return hits
        with ask.stages.of("rerank"):
            rows = [row for row, _ in _rows_in_order(session, ask, hits[: max(RERANKED, 2 * ask.top_k)])]
            texts = [indexed_text(row.text, row.headings, row.path) for row in rows]
            scores = self._reranker.scores(ask.query, texts)
            scored = [(int(row.id), score) for row, score in zip(rows, scores, strict=True)]
            return sorted(scored, key=lambda hit: -hit[1])  # of equals the one that was found first

    def _joined(self, session: Session, ask: Ask, chosen: list[tuple[Row[Any], float]]) -> list[RetrievedChunk]:
        if ask.neighbours and ask.token_budget is not None:
            with ask.stages.of("neighbours"):
                chosen = with_neighbours(session, FOUND, chosen, ask.token_budget)
        return [retrieved(row, score) for row, score in chosen]

    def _lists(
        self, session: Session, ask: Ask, corpora: list[str], rules: Rules | None, depth: int
    ) -> list[list[Hit]]:
        if ask.mode == "dense":
            return [self._by_meaning(session, ask, corpora, rules, depth)]
        if ask.mode == "lexical":
            return [self._by_words(session, ask, corpora, rules, depth)]
        beside = self._words_beside(ask, corpora, rules, depth)
        near = self._by_meaning(session, ask, corpora, rules, depth)
        return [near, beside.result() if beside else self._by_words(session, ask, corpora, rules, depth)]

    def _words_beside(
        self, ask: Ask, corpora: list[str], rules: Rules | None, depth: int
    ) -> Future[list[Hit]] | None:
        """The search by words on another thread, in a snapshot of its own: what only that one holds has no row in ours. None
        if enough run already, since nobody who holds a connection may wait for many others' second one."""
        if not self._free.acquire(blocking=False):
            return None

        def search() -> list[Hit]:
            try:
                with self._catalogue.read() as session:
                    return self._by_words(session, ask, corpora, rules, depth)
            finally:
                self._free.release()

        return self._beside.submit(copy_context().run, search)

    def _by_meaning(self, session: Session, ask: Ask, corpora: list[str], rules: Rules | None, depth: int) -> list[Hit]:
        with ask.stages.of("embed"):
            vector = self._vectors.get(ask.query)
        with ask.stages.of("dense"):
            return self._index.dense(session, corpora, vector, depth, rules)

    def _by_words(self, session: Session, ask: Ask, corpora: list[str], rules: Rules | None, depth: int) -> list[Hit]:
        with ask.stages.of("lexical"):
            return self._index.lexical(session, corpora, ask.query, depth, rules)


def fuse(lists: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Reciprocal rank fusion: best first, as shares of the best attainable score. Of one list it is its order."""
    scores: dict[int, float] = {}
    for hits in lists:
        for rank, (chunk_id, _) in enumerate(hits, start=1):
            scores[chunk_id] = scores.get(chunk_id, 0.0) + (RRF_K + 1) / (RRF_K + rank) / len(lists)
    return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))


def _check(query: str, top_k: int, token_budget: int | None, mode: str) -> None:
    if not query.strip():
        raise UserError("The query is empty.")
    if not 1 <= top_k <= MOST_RESULTS:
        raise UserError(f"A search returns 1 to {MOST_RESULTS} chunks; {top_k} were asked for.")
    if token_budget is not None and token_budget < 1:
        raise UserError("A token budget is at least 1.")
    if mode not in ("hybrid", "dense", "lexical"):
        raise UserError(f"A search's mode is hybrid, dense or lexical; not {mode!r}.")


def _confirmed(session: Session, ask: Ask, found: list[RetrievedChunk]) -> list[RetrievedChunk]:
    """What is still there and the asker's to see. SQLite may give a deleted chunk's id to another chunk."""
    rows = {row.id: row for row in _visible(session, ask, [chunk.chunk_id for chunk in found], STILL)}
    return [
        chunk
        for chunk in found
        if (row := rows.get(chunk.chunk_id)) is not None
        and (row.document_id, _ids(row.token_ids)) == (chunk.document_id, chunk.token_ids)
    ]


def _visible(session: Session, ask: Ask, chunk_ids: Sequence[int], columns: Sequence[Any]) -> Iterator[Row[Any]]:
    """Of these chunks the ones that exist and are the asker's to see, by their rows and not by the index."""
    query = select(*columns).join(Document, Document.id == ChunkRow.document_id).where(ChunkRow.id.in_(chunk_ids))
    kept: Sequence[Row[Any]] = ()
    if ask.as_of is not None:
        query = query.where(current_then(ask.as_of))
        kept = kept_rows(session, chunk_ids, ask.as_of)
    return (row for row in (*session.execute(query), *kept) if ask.rules.permits(row))


def _rows_in_order(session: Session, ask: Ask, hits: list[Hit]) -> Iterator[tuple[Row[Any], float]]:
    """Rows of the hits, best first, read as they are needed."""
    part = min(2 * ask.top_k, 500)
    for start in range(0, len(hits), part):
        some = hits[start : start + part]
        rows = {row.id: row for row in _visible(session, ask, [chunk_id for chunk_id, _ in some], FOUND)}
        for chunk_id, score in some:
            if chunk_id in rows:
                yield rows[chunk_id], score


def _choose(rows: Iterable[tuple[Row[Any], float]], ask: Ask) -> list[tuple[Row[Any], float]]:
    """Down the ranking: a text once, at or above the threshold, and whatever still fits the budget."""
    chosen: list[tuple[Row[Any], float]] = []
    texts: set[bytes] = set()
    left = ask.token_budget
    for row, score in rows:
        if len(chosen) == ask.top_k:
            break
        if ask.score_threshold is not None and score < ask.score_threshold:
            continue
        tokens = len(row.token_ids) // 4
        if row.token_ids in texts or (left is not None and tokens > left):
            continue
        texts.add(row.token_ids)
        left = None if left is None else left - tokens
        chosen.append((row, score))
    return chosen


def retrieved(row: Row[Any], score: float) -> RetrievedChunk:
    """A chunk made of its row, which has the columns FOUND."""
    return RetrievedChunk(
        chunk_id=row.id,
        document_id=row.document_id,
        corpus_id=row.corpus_id,
        file_id=row.file_id,
        path=row.path,
        version=row.sha256,
        text=row.text,
        token_ids=_ids(row.token_ids),
        start=row.start,
        end=row.end,
        headings=tuple(row.headings),
        page_start=row.page_start,
        page_end=row.page_end,
        line_start=row.line_start,
        line_end=row.line_end,
        score=score,
        kv_key=row.kv_key,
        codec=row.codec,
        not_stored=row.not_stored is not None,
        attributes=dict(row.attributes),
        ordinal=row.ordinal,
    )


def _ids(token_ids: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(token_ids, dtype="<u4").tolist())


class _QueryVectors:
    """The last queries' vectors: a conversation asks the same thing more than once."""

    def __init__(self, embedder: TextEmbedder) -> None:
        self._embedder = embedder
        self._lock = threading.Lock()
        self._vectors: OrderedDict[str, Sequence[float]] = OrderedDict()

    def get(self, query: str) -> Sequence[float]:
        with self._lock:
            if query in self._vectors:
                self._vectors.move_to_end(query)
                return self._vectors[query]
        vector = self._embedder.embed([query])[0]
        with self._lock:
            self._vectors[query] = vector
            while len(self._vectors) > CACHED_QUERIES:
                self._vectors.popitem(last=False)
        return vector
