"""A worker that is told to end gives back what it holds: another one has it at once, and no attempt is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fixtures_work import WordEmbedder, Work, paragraphs

from ingest.jobs import cancel, create_job
from ingest.plans import claim_plan
from ingest.worker import IngestWorker
from storage.catalogue.schema import ChunkRow, Job, JobFile
from storage.errors import Stopping


class Worker:
    """A worker whose embedder does as it is told."""

    def __init__(self, work: Work) -> None:
        self.stop = threading.Event()
        self.embedding: Callable[[], None] = lambda: None
        outer = self

        class Embedder(WordEmbedder):
            def embed(self, texts: Sequence[str]) -> list[list[float]]:
                outer.embedding()
                return super().embed(texts)

        pipeline = replace(work.pipeline, embedder=Embedder(), stopping=self.stop.is_set)
        self.worker = IngestWorker(work.catalogue, pipeline, None, "w1", work.rung.append, 3600.0)

    def drain(self) -> int:
        return self.worker.drain(self.stop.is_set)


@pytest.fixture
def worker(work: Work) -> Worker:
    return Worker(work)


def test_a_file_in_work_is_given_back_at_the_next_step_and_done_once(work: Work, worker: Worker) -> None:
    worker.embedding = worker.stop.set
    job = work.upload(work.corpus(), {"long.txt": paragraphs(100)})
    assert worker.drain() == 1, "so that the bell is rung for it"
    assert work.count(ChunkRow) == 0
    assert work.count(JobFile, JobFile.status == "pending", JobFile.attempt == 0, JobFile.lease_expires.is_(None)) == 1
    with work.catalogue.read() as session:
        assert session.get_one(Job, job).status == "in_progress"
    assert work.worker("w2").drain() == 1
    assert work.count(JobFile, JobFile.status == "done", JobFile.attempt == 0) == 1
    assert work.count(ChunkRow) == 100


def test_the_file_that_was_read_ahead_is_given_back_too(work: Work, worker: Worker) -> None:
    ahead = threading.Event()
    work.parser.accident = lambda name: ahead.set() if name == "b.txt" else None

    def embedding() -> None:
        assert ahead.wait(30)
        worker.stop.set()

    worker.embedding = embedding
    work.upload(work.corpus(), {"a.txt": paragraphs(100), "b.txt": "second", "c.txt": "third"})
    worker.drain()
    assert work.count(JobFile, JobFile.status == "pending", JobFile.attempt == 0) == 3
    assert work.worker("w2").drain() == 3
    assert work.count(JobFile, JobFile.status == "done", JobFile.attempt == 0) == 3


def test_a_cancelled_jobs_file_is_cancelled_and_not_handed_over(work: Work, worker: Worker) -> None:
    job = work.upload(work.corpus(), {"long.txt": paragraphs(100)})

    def embedding() -> None:
        with work.catalogue.write() as session:
            cancel(session, job)
        worker.stop.set()

    worker.embedding = embedding
    worker.drain()
    assert work.count(JobFile, JobFile.status == "cancelled") == 1
    assert work.worker("w2").drain() == 0


def test_a_plan_is_handed_over_without_counting(work: Work, worker: Worker) -> None:
    class Planner:
        def plan(self, job: Job) -> None:
            worker.stop.set()
            raise Stopping

    worker.worker.planner = Planner()
    corpus = work.corpus()
    with work.catalogue.write() as session:
        job = create_job(session, tenant_id="t1", corpus_id=corpus.id, type="sync", planned=False).id
    worker.drain()
    with work.catalogue.read() as session:
        row = session.get_one(Job, job)
        assert (row.attempt, row.lease_owner, row.lease_expires, row.status) == (0, None, None, "in_progress")
    taken = claim_plan(work.catalogue, "w2", 10.0)
    assert taken is not None
    assert taken.attempt == 1
