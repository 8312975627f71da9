"""A corpus embedded again by another model: the old index answers until the new one is whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fixtures_work import Index, WordEmbedder, Work, open_work, paragraphs
from sqlalchemy import select, update

from ingest.deletes import delete_documents
from ingest.jobs import cancel
from ingest.pipeline import Pipeline
from ingest.reindex import Reindexer, queue
from ingest.ticker import reap
from ingest.worker import IngestWorker
from retrieval.index import ChunkIndex, open_index
from retrieval.search import Retriever
from storage.catalogue.schema import Corpus, Document, JobFile
from storage.errors import UserError

FILES = {"a.txt": paragraphs(40, tag="a"), "b.txt": paragraphs(40, tag="b"), "c.txt": paragraphs(3, tag="c")}


class Killed(BaseException):
    """The process ends here: nothing that comes after runs."""


class OtherEmbedder(WordEmbedder):
    identity = "other letters"
    dimensions = 16

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.before_batch: Any = lambda number: None
        self._batches = 0

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        self._batches += 1
        self.before_batch(self._batches)
        self.texts += texts
        return [[value * 0.5**0.5 for value in self._vector(text) * 2] for text in texts]


@dataclass
class NewSide:
    """A worker with the new setting."""

    work: Work
    embedder: OtherEmbedder = field(default_factory=OtherEmbedder)

    def __post_init__(self) -> None:
        self.index: ChunkIndex = open_index(self.work.catalogue, self.embedder)
        self.index.ensure()

    def stage(self, session: Any, corpus_id: str, rows: Any) -> None:
        self.index.stage(session, corpus_id, [(number, vector, text) for number, text, vector in rows])

    def flip(self, session: Any, corpus_id: str) -> bool:
        return self.index.generations.flip(session, corpus_id, self.index)

    def clear(self, session: Any, corpus_id: str, most: int) -> int:
        return self.index.generations.clear(session, corpus_id, self.index, most)

    def lacking(self, *arguments: Any) -> list[int]:
        return self.index.lacking(*arguments)

    def queue(self, corpus: Corpus) -> str:
        with self.work.catalogue.write() as session:
            return queue(session, session.get_one(Corpus, corpus.id), self.embedder.identity).id

    def worker(self, embedder: WordEmbedder | None = None) -> IngestWorker:
        base = self.work.pipeline
        reindexer = Reindexer(self.work.catalogue, embedder or self.embedder, self)
        pipeline = Pipeline(**{**base.__dict__, "reindexer": reindexer})
        return IngestWorker(self.work.catalogue, pipeline, None, "new", lambda _: None, self.work.lease_seconds)

    def find(self, corpus: Corpus, new: bool) -> int:
        """How many chunks a search finds, by the new setting or the old one."""
        index, embedder = (self.index, OtherEmbedder()) if new else (self.work.index.real, WordEmbedder())
        found = Retriever(self.work.catalogue, index, embedder).search(
            tenant_id=corpus.tenant_id, corpus_ids=[corpus.id], query="a0w1", top_k=500, mode="dense"
        )
        return len(found)

    def states(self, corpus: Corpus) -> tuple[int | None, int | None]:
        """What the old setting finds, and what the new one; None: refused."""
        return self._state(corpus, False), self._state(corpus, True)

    def _state(self, corpus: Corpus, new: bool) -> int | None:
        try:
            return self.find(corpus, new)
        except UserError as error:
            if error.code != "reindex_required":
                raise
            return None


@pytest.fixture
def side(catalogue_url: str, tmp_path: Path) -> Iterator[NewSide]:
    work = open_work(tmp_path, catalogue_url)
    yield NewSide(work)
    work.catalogue.close()


@pytest.fixture
def corpus(side: NewSide) -> Corpus:
    corpus = side.work.corpus()
    side.work.ingest(corpus, FILES)
    side.work.compute_kv()
    return corpus


def test_the_old_index_answers_until_the_new_one_is_whole_and_never_both(side: NewSide, corpus: Corpus) -> None:
    seen: list[tuple[int | None, int | None]] = []
    side.embedder.before_batch = lambda _: seen.append(side.states(corpus))
    chunks = len(side.work.chunks(corpus))
    job_id = side.queue(corpus)
    assert side.worker().drain() == 3
    assert len(seen) >= 3
    assert set(seen) == {(chunks, None)}
    assert side.states(corpus) == (None, chunks)
    with side.work.catalogue.write() as session:
        assert side.index.drop(session, corpus.id, side.work.index.real.generations.name, 1) == 0, "nothing of the old is left"
    shown = side.work.view(job_id)
    assert (shown["type"], shown["status"]) == ("reindex", "completed")
    assert (shown["progress"]["files_done"], shown["progress"]["chunks_total"]) == (3, chunks)
    assert sorted(side.embedder.texts) == sorted(side.work.chunks(corpus))  # each once


def test_a_worker_that_dies_leaves_the_old_index_whole_and_the_next_goes_on_from_there(
    side: NewSide, corpus: Corpus
) -> None:
    chunks = len(side.work.chunks(corpus))

    def die(number: int) -> None:
        if number == 3:
            raise Killed

    side.embedder.before_batch = die
    job_id = side.queue(corpus)
    with pytest.raises(Killed):
        side.worker().drain()
    done = len(side.embedder.texts)
    assert 0 < done < chunks
    assert side.states(corpus)[0] == chunks
    with side.work.catalogue.write() as session:
        session.execute(update(JobFile).where(JobFile.status == "leased").values(lease_expires=time.time() - 1))
        reap(session)
    side.embedder.before_batch, side.embedder.texts = lambda _: None, []
    side.worker().drain()
    assert len(side.embedder.texts) == chunks - done
    assert side.states(corpus) == (None, chunks)
    assert side.work.view(job_id)["status"] == "completed"


def test_a_cancelled_reindex_leaves_the_old_index_as_it_was(side: NewSide, corpus: Corpus) -> None:
    job_id = side.queue(corpus)
    assert side.queue(corpus) == job_id  # asking twice is asking once
    with side.work.catalogue.write() as session:
        cancel(session, job_id)
    side.worker().drain()
    assert side.work.view(job_id)["status"] == "cancelled"
    assert side.states(corpus) == (len(side.work.chunks(corpus)), None)
    assert side.work.document(corpus, "a.txt").status == "completed"


def test_a_worker_with_another_embedder_than_the_one_asked_for_refuses(side: NewSide, corpus: Corpus) -> None:
    job_id = side.queue(corpus)
    side.worker(WordEmbedder()).drain()
    shown = side.work.view(job_id)
    assert shown["status"] == "failed"
    assert {error["code"] for error in shown["errors"]} == {"embedding_failed"}
    assert "'other letters'" in shown["errors"][0]["message"]
    assert side.states(corpus) == (len(side.work.chunks(corpus)), None)


def test_what_changes_under_way_is_in_the_new_index_as_it_is_in_the_corpus(side: NewSide, corpus: Corpus) -> None:
    """A worker with the old setting adds a document, another one is deleted."""

    def change(number: int) -> None:
        if number == 2:
            side.work.ingest(corpus, {"late.txt": paragraphs(5, tag="late")})
            with side.work.catalogue.read() as session:
                gone = session.scalars(select(Document).where(Document.path == "b.txt")).one()
            side.work.deleter.document(corpus.tenant_id, gone.id)

    side.embedder.before_batch = change
    side.queue(corpus)
    side.worker().drain()
    side.work.compute_kv()
    chunks = side.work.chunks(corpus)
    assert any(chunk.startswith("late") for chunk in chunks)
    assert not any(chunk.startswith("b0") for chunk in chunks)
    if side.states(corpus) == (len(chunks), None):  # its last file was the deleted one: once more brings it to its end
        side.queue(corpus)
        side.worker().drain()
    assert side.states(corpus) == (None, len(chunks))


def test_an_empty_corpus_needs_no_work(side: NewSide) -> None:
    empty = side.work.corpus("empty")
    side.queue(empty)
    assert side.worker().drain() == 0
    assert side.states(empty) == (0, 0)


def _keeping(side: NewSide) -> tuple[Corpus, float]:
    """A corpus that keeps its versions, and a moment at which `limit 10` is current in it."""
    corpus = side.work.corpus()
    with side.work.catalogue.write() as session:
        row = session.get_one(Corpus, corpus.id)
        row.settings, row.versions_from = {"keep_versions": "30d"}, time.time()
    side.work.ingest(corpus, {"a.txt": b"limit 10"})
    time.sleep(0.01)
    return corpus, time.time()


def test_kept_generations_come_along(side: NewSide) -> None:
    corpus, then = _keeping(side)
    side.work.ingest(corpus, {"a.txt": b"limit 20"})
    side.queue(corpus)
    assert side.worker().drain() == 1
    retriever = Retriever(side.work.catalogue, side.index, OtherEmbedder())
    ask = {"tenant_id": corpus.tenant_id, "corpus_ids": [corpus.id], "query": "limit", "top_k": 5}
    for mode in ("dense", "lexical"):
        assert [c.text for c in retriever.search(**ask, mode=mode, as_of=then)] == ["limit 10"]
        assert [c.text for c in retriever.search(**ask, mode=mode)] == ["limit 20"]


def test_kept_generations_come_along_when_no_document_is_left(side: NewSide) -> None:
    corpus, then = _keeping(side)
    with side.work.catalogue.write() as session:
        delete_documents(session, side.work.pipeline.index, [session.scalars(select(Document.id)).one()], keep=True)
    side.queue(corpus)
    assert side.worker().drain() == 1
    retriever = Retriever(side.work.catalogue, side.index, OtherEmbedder())
    ask = {"tenant_id": corpus.tenant_id, "corpus_ids": [corpus.id], "query": "limit", "top_k": 5}
    assert [c.text for c in retriever.search(**ask, as_of=then)] == ["limit 10"]


def test_a_chunk_is_found_by_its_documents_name_and_headings(side: NewSide) -> None:
    corpus = side.work.corpus()
    side.work.ingest(corpus, {"terms/fiverr.txt": b"who can see it", "terms/groupon.txt": b"who can see it"})
    retriever = Retriever(side.work.catalogue, side.work.index.real, WordEmbedder())
    for mode in ("dense", "lexical", "hybrid"):
        for name in ("fiverr", "groupon"):
            ask = {"tenant_id": corpus.tenant_id, "corpus_ids": [corpus.id], "query": f"{name}, who can see it", "top_k": 1}
            assert [c.path for c in retriever.search(**ask, mode=mode)] == [f"terms/{name}.txt"]


def test_a_file_for_a_corpus_that_waits_for_a_reindex_fails_with_the_way_out(side: NewSide, corpus: Corpus) -> None:
    job = side.work.upload(corpus, {"late.txt": b"too late"})
    pipeline = Pipeline(**{**side.work.pipeline.__dict__, "index": Index(side.work.catalogue, side.embedder)})
    IngestWorker(side.work.catalogue, pipeline, None, "new", lambda _: None, side.work.lease_seconds).drain()
    [error] = side.work.view(job)["errors"]
    assert (error["filename"], error["code"]) == ("late.txt", "embedding_failed")
    assert f"preread reindex {corpus.id}" in error["message"]
