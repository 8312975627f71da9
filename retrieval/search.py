"""From a question to the chunks that answer it, within the asker's rights.

Fusion is reciprocal rank fusion with k = 60 (Cormack, Clarke and Büttcher, SIGIR 2009): it needs no
calibration between cosine and word scores, whose scales differ by corpus and by database. A fused score is
given as the share of the best attainable: first place in every list is 1.0. A dense score is the cosine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from retrieval import filters as attribute_filters
from retrieval.index import MOST_HITS, ChunkIndex, Hit
from retrieval.versions import Kept, kept_chunks, kept_documents
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow, Corpus, Document, VersionChunk
from storage.catalogue.versions import check_kept, current_then, past_of
from storage.errors import UserError
from storage.types import RetrievedChunk, TextEmbedder

Mode = Literal["hybrid", "dense", "lexical"]
_Found = tuple[ChunkRow, Document] | tuple[VersionChunk, Kept]
_Ranked = tuple[ChunkRow | VersionChunk, Document | Kept, float]
RRF_K = 60
MOST_RESULTS = 500
CACHED_QUERIES = 256
RULES = (Document.id, Document.tenant_id, Document.corpus_id, Document.access, Document.attributes)
SEARCHES = 3  # at most, when documents change while we look


@dataclass(frozen=True)
class Ask:
    """One search, checked."""

    tenant_id: str
    corpus_ids: tuple[str, ...]
    query: str
    vector: Sequence[float] | None
    mode: Mode
    top_k: int
    token_budget: int | None
    principals: frozenset[str]
    filters: Mapping[str, Any] | None
    score_threshold: float | None
    as_of: float | None = None  # see retrieval.versions

    def permits(self, document: Document | Kept | Row[Any]) -> bool:
        """The one rule of who may see a document, and whether it was asked for."""
        return (
            document.tenant_id == self.tenant_id
            and document.corpus_id in self.corpus_ids
            and (document.access is None or not self.principals.isdisjoint(document.access))
            and attribute_filters.matches(self.filters, document.attributes)
        )


class Retriever:
    """Searches one catalogue. Threads may share it."""

    def __init__(self, catalogue: Catalogue, index: ChunkIndex, embedder: TextEmbedder) -> None:
        self._catalogue = catalogue
        self._index = index
        self._embedder = embedder
        self._vectors = _QueryVectors(embedder)

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
        as_of: float | None = None,
    ) -> list[RetrievedChunk]:
        """The best chunks, best first; `as_of` a time (seconds since the epoch), of what was current then. Without
        principals only documents without an access list are seen.

        Corpora that are not the tenant's are passed over like corpora that do not exist.
        """
        _check(query, top_k, token_budget, mode)
        attribute_filters.check(filters)
        ask = Ask(
            tenant_id=tenant_id,
            corpus_ids=tuple(dict.fromkeys(corpus_ids)),
            query=query,
            vector=None if mode == "lexical" else self._vectors.get(query),
            mode=mode,
            top_k=top_k,
            token_budget=token_budget,
            principals=frozenset(principals or ()),
            filters=filters,
            score_threshold=score_threshold,
            as_of=as_of,
        )
        return self._settled(ask)

    def _settled(self, ask: Ask) -> list[RetrievedChunk]:
        """Search in one snapshot, then look at the final list again in a newer one.

        If something vanished meanwhile (deleted, replaced by a new generation, closed to the asker), search
        again, so that the answer has what replaced it.
        """
        for _ in range(SEARCHES):
            with self._catalogue.read() as session:
                found = self._ranked(session, ask)
            with self._catalogue.read() as session:
                kept = _confirmed(session, ask, found)
            if len(kept) == len(found):
                break
        return kept

    def _ranked(self, session: Session, ask: Ask) -> list[RetrievedChunk]:
        owned = select(Corpus.id).where(Corpus.id.in_(ask.corpus_ids), Corpus.tenant_id == ask.tenant_id)
        corpora = sorted(session.scalars(owned))
        if ask.as_of is not None:
            check_kept(session, corpora, ask.as_of)
        documents = _documents_to_search(session, ask, corpora) if corpora else []
        if documents == []:
            return []
        if ask.as_of is not None:
            corpora = [*corpora, *map(past_of, corpora)]
        depth = max(50, 4 * ask.top_k)
        while True:  # deeper only if duplicates or the budget ate what was found
            lists = self._lists(session, ask, corpora, documents, depth)
            chosen = _choose(_rows_in_order(session, ask, _scores(ask.mode, lists)), ask)
            exhausted = all(len(hits) < depth for hits in lists)
            if len(chosen) >= ask.top_k or exhausted or depth >= MOST_HITS or ask.token_budget is not None:
                return chosen
            depth = min(8 * depth, MOST_HITS)

    def _lists(
        self, session: Session, ask: Ask, corpora: list[str], documents: list[str] | None, depth: int
    ) -> list[list[Hit]]:
        lists = []
        if ask.vector is not None:
            lists.append(self._index.dense(session, corpora, ask.vector, depth, documents))
        if ask.mode != "dense":
            lists.append(self._index.lexical(session, corpora, ask.query, depth, documents))
        return lists


def fuse(lists: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Reciprocal rank fusion: best first, as shares of the best attainable score."""
    scores: dict[int, float] = {}
    for hits in lists:
        for rank, (chunk_id, _) in enumerate(hits, start=1):
            scores[chunk_id] = scores.get(chunk_id, 0.0) + (RRF_K + 1) / (RRF_K + rank) / len(lists)
    return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))


def _scores(mode: Mode, lists: list[list[Hit]]) -> list[Hit]:
    return lists[0] if mode == "dense" else fuse(lists)


def _check(query: str, top_k: int, token_budget: int | None, mode: str) -> None:
    if not query.strip():
        raise UserError("The query is empty.")
    if not 1 <= top_k <= MOST_RESULTS:
        raise UserError(f"A search returns 1 to {MOST_RESULTS} chunks; {top_k} were asked for.")
    if token_budget is not None and token_budget < 1:
        raise UserError("A token budget is at least 1.")
    if mode not in ("hybrid", "dense", "lexical"):
        raise UserError(f"A search's mode is hybrid, dense or lexical; not {mode!r}.")


def _documents_to_search(session: Session, ask: Ask, corpora: list[str]) -> list[str] | None:
    """Ids of the documents to rank; None if every document of the corpora is."""
    rules = select(*RULES).where(Document.corpus_id.in_(corpora))
    if ask.as_of is not None:
        kept = [one.version_id for one in kept_documents(session, corpora, ask.as_of) if ask.permits(one)]
        return kept + [one.id for one in session.execute(rules.where(current_then(ask.as_of))) if ask.permits(one)]
    if ask.filters is None:
        closed = rules.where(Document.access.is_not(None)).with_only_columns(Document.id).limit(1)
        if session.scalar(closed) is None:
            return None
    return [document.id for document in session.execute(rules) if ask.permits(document)]


def _visible(session: Session, ask: Ask, chunk_ids: Sequence[int]) -> dict[int, _Found]:
    """Of these chunks the ones that exist and are the asker's to see, by their rows and not by the index."""
    found: dict[int, _Found] = {}
    then = [] if ask.as_of is None else [current_then(ask.as_of)]
    for start in range(0, len(chunk_ids), 500):
        some = chunk_ids[start : start + 500]
        rows = session.execute(
            select(ChunkRow, Document)
            .join(Document, Document.id == ChunkRow.document_id)
            .where(ChunkRow.id.in_(some), *then)
        )
        found |= {chunk.id: (chunk, document) for chunk, document in rows if ask.permits(document)}
        if ask.as_of is not None:
            kept = kept_chunks(session, some, ask.as_of)
            found |= {number: pair for number, pair in kept.items() if ask.permits(pair[1])}
    return found


def _confirmed(session: Session, ask: Ask, found: list[RetrievedChunk]) -> list[RetrievedChunk]:
    """What is still there and the asker's to see. SQLite may give a deleted chunk's id to another chunk."""
    rows = _visible(session, ask, [chunk.chunk_id for chunk in found])
    now = (_retrieved(rows[old.chunk_id][0], rows[old.chunk_id][1], old.score) if old.chunk_id in rows else None for old in found)
    return [
        new
        for old, new in zip(found, now, strict=True)
        if new and (new.document_id, new.token_ids) == (old.document_id, old.token_ids)
    ]


def _rows_in_order(session: Session, ask: Ask, hits: list[Hit]) -> Iterable[_Ranked]:
    """Rows of the hits, best first, read as they are needed."""
    for start in range(0, len(hits), 100):
        part = hits[start : start + 100]
        rows = _visible(session, ask, [chunk_id for chunk_id, _ in part])
        for chunk_id, score in part:
            if chunk_id in rows:
                yield (*rows[chunk_id], score)


def _choose(rows: Iterable[_Ranked], ask: Ask) -> list[RetrievedChunk]:
    """Down the ranking: a text once, at or above the threshold, and whatever still fits the budget."""
    chosen: list[RetrievedChunk] = []
    texts: set[bytes] = set()
    left = ask.token_budget
    for chunk, document, score in rows:
        if len(chosen) == ask.top_k or (ask.score_threshold is not None and score < ask.score_threshold):
            break
        tokens = len(chunk.token_ids) // 4
        if chunk.token_ids in texts or (left is not None and tokens > left):
            continue
        texts.add(chunk.token_ids)
        left = None if left is None else left - tokens
        chosen.append(_retrieved(chunk, document, score))
    return chosen


def _retrieved(chunk: ChunkRow | VersionChunk, document: Document | Kept, score: float) -> RetrievedChunk:
    return RetrievedChunk(
        chunk_id=chunk.number,
        document_id=document.id,
        corpus_id=document.corpus_id,
        file_id=document.file_id,
        path=document.path,
        version=document.sha256,
        text=chunk.text,
        token_ids=tuple(np.frombuffer(chunk.token_ids, dtype="<u4").tolist()),
        start=chunk.start,
        end=chunk.end,
        headings=tuple(chunk.headings),
        page_start=chunk.page_start,
        page_end=chunk.page_end,
        line_start=chunk.line_start,
        line_end=chunk.line_end,
        score=score,
        kv_key=chunk.kv_key,
        codec=document.codec,
        not_stored=document.not_stored is not None,
        attributes=dict(document.attributes),
    )


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
