"""From a question to the chunks that answer it, within the asker's rights.

Fusion is reciprocal rank fusion with k = 60 (Cormack, Clarke and Büttcher, SIGIR 2009): it needs no
calibration between cosine and word scores, whose scales differ by corpus and by database. A fused score is
only an order. What a chunk's score says, from 0 to 1, is how much it has to do with the query (`retrieval/relevance.py`), or what
the reranker says of it. Where no reranker has ordered them, scores need not fall from one chunk to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from retrieval import filters as attribute_filters
from retrieval.ask import Ask, Mode, Stages, check
from retrieval.index import MOST_HITS, ChunkIndex, Generations, Hit, owned_corpora
from retrieval.neighbours import with_neighbours
from retrieval.query_vectors import QueryVectors
from retrieval.relevance import relevance
from retrieval.reranker import Reranker
from retrieval.results import FOUND, choose, confirmed, retrieved, rows_in_order
from retrieval.rules import Rules
from retrieval.versions import PastRules
from storage.catalogue.engine import Catalogue
from storage.catalogue.versions import check_kept, past_of
from storage.tracing import span
from storage.types import RetrievedChunk, TextEmbedder, indexed_text

RRF_K = 60
RERANKED = 32
SEARCHES = 3  # at most, when documents change while we look
BESIDE = 2  # searches by words that run beside the one by meaning, on another core


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
        self._vectors = QueryVectors(embedder)
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
        check(query, top_k, token_budget, mode)
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
            beside = self._words_beside(ask)
            try:
                vector = self._vector(ask)  # before we hold a connection: the encoder may be busy with an ingest
                with self._catalogue.read() as session:
                    found = self._ranked(session, ask, vector, beside)
            finally:
                if beside is not None:
                    wait([beside])  # no search leaves a connection in use behind it
            with ask.stages.of("confirm"), self._catalogue.read() as session:
                kept = confirmed(session, ask, found)
            if len(kept) == len(found):
                break
        return kept

    def _vector(self, ask: Ask) -> Sequence[float] | None:
        if ask.mode == "lexical":
            return None
        with ask.stages.of("embed"):
            return self._vectors.get(ask.query)

    def _ranked(
        self, session: Session, ask: Ask, vector: Sequence[float] | None, beside: Future[list[Hit]] | None
    ) -> list[RetrievedChunk]:
        with ask.stages.of("rules"):
            scope = self._scope(session, ask)
        if not scope.corpora:
            return []
        ask = replace(ask, rules=scope.of)
        depth = _depth(ask)
        while True:  # deeper only if duplicates or the budget ate what was found
            lists = self._lists(session, ask, scope, vector, beside, depth)
            hits = self._reranked(session, ask, self._scored(session, ask, vector, lists))
            with ask.stages.of("rows"):
                chosen = choose(rows_in_order(session, ask, hits), ask)
            exhausted = all(len(hits) < depth or hits[-1][1] < (ask.score_threshold or 0) for hits in lists)
            if len(chosen) >= ask.top_k or exhausted or depth >= MOST_HITS or ask.token_budget is not None:
                return self._joined(session, ask, chosen)
            depth, beside = min(8 * depth, MOST_HITS), None

    def _scored(
        self, session: Session, ask: Ask, vector: Sequence[float] | None, lists: list[list[Hit]]
    ) -> list[Hit]:
        """In the order of fusion, each with its relevance."""
        order = [chunk_id for chunk_id, _ in fuse(lists)]
        near: dict[int, float] = {}
        if vector is not None:
            near = dict(lists[0])
            if others := [chunk_id for chunk_id in order if chunk_id not in near]:
                near |= self._index.cosines(session, others, vector)
        worded = dict(lists[-1]) if ask.mode != "dense" else {}
        return [(chunk_id, relevance(near.get(chunk_id), worded.get(chunk_id, 0.0))) for chunk_id in order]

    def _reranked(self, session: Session, ask: Ask, hits: list[Hit]) -> list[Hit]:
        """The first of the hits in the reranker's order; the others are left out, since they have no score of its kind."""
        if self._reranker is None or not ask.rerank:
            return hits
        with ask.stages.of("rerank"):
            rows = [row for row, _ in rows_in_order(session, ask, hits[: max(RERANKED, 2 * ask.top_k)])]
            texts = [indexed_text(row.text, row.headings, row.path) for row in rows]
            scores = self._reranker.scores(ask.query, texts)
            scored = [(int(row.id), score) for row, score in zip(rows, scores, strict=True)]
            return sorted(scored, key=lambda hit: -hit[1])  # of equals the one that was found first

    def _joined(self, session: Session, ask: Ask, chosen: list[tuple[Row[Any], float]]) -> list[RetrievedChunk]:
        if ask.neighbours and ask.token_budget is not None:
            with ask.stages.of("neighbours"):
                chosen = with_neighbours(session, FOUND, chosen, ask.token_budget)
        return [retrieved(row, score) for row, score in chosen]

    def _scope(self, session: Session, ask: Ask) -> _Scope:
        corpora = owned_corpora(session, self._generations, ask.rules.tenant_id, ask.rules.corpora)
        if ask.as_of is not None:
            check_kept(session, corpora, ask.as_of)
        rules = replace(ask.rules, corpora=tuple(corpora))
        needed = rules if corpora and rules.needed(session) else None
        return _Scope(rules, [*corpora, *map(past_of, corpora)] if ask.as_of is not None else corpora, needed)

    def _lists(
        self,
        session: Session,
        ask: Ask,
        scope: _Scope,
        vector: Sequence[float] | None,
        beside: Future[list[Hit]] | None,
        depth: int,
    ) -> list[list[Hit]]:
        lists = []
        if vector is not None:
            with ask.stages.of("dense"):
                lists.append(self._index.dense(session, scope.corpora, vector, depth, scope.rules))
        if ask.mode != "dense":
            lists.append(beside.result() if beside else self._by_words(session, ask, scope, depth))
        return lists

    def _by_words(self, session: Session, ask: Ask, scope: _Scope, depth: int) -> list[Hit]:
        with ask.stages.of("lexical"):
            return self._index.lexical(session, scope.corpora, ask.query, depth, scope.rules)

    def _words_beside(self, ask: Ask) -> Future[list[Hit]] | None:
        """The search by words on another thread, in a snapshot of its own: what only that one holds has no row in ours. None
        if enough run already, since nobody who holds a connection may wait for many others' second one."""
        if ask.mode != "hybrid" or not self._free.acquire(blocking=False):
            return None

        def search() -> list[Hit]:
            try:
                with self._catalogue.read() as session:
                    scope = self._scope(session, ask)
                    return self._by_words(session, ask, scope, _depth(ask)) if scope.corpora else []
            finally:
                self._free.release()

        return self._beside.submit(copy_context().run, search)


@dataclass(frozen=True)
class _Scope:
    """Where a search looks in one snapshot."""

    of: Rules  # of the asker's own corpora
    corpora: list[str]  # with the partitions of kept generations, if asked for
    rules: Rules | None  # None: all that the corpora hold may be seen


def _depth(ask: Ask) -> int:
    """Of the first look."""
    return max(50, 4 * ask.top_k)


def fuse(lists: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Reciprocal rank fusion: best first, as shares of the best attainable score. Of one list it is its order."""
    scores: dict[int, float] = {}
    for hits in lists:
        for rank, (chunk_id, _) in enumerate(hits, start=1):
            scores[chunk_id] = scores.get(chunk_id, 0.0) + (RRF_K + 1) / (RRF_K + rank) / len(lists)
    return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))
