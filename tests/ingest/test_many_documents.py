"""A job of very many documents is written down some at a time: others write in between, and a kill in between loses and doubles
nothing."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures_work import Work, open_work
from sqlalchemy import select

from ingest import attaching
from ingest.attach import attach
from ingest.jobs import cancel, retry
from ingest.planner import SourcePlanner
from ingest.sources import Entry, Reach
from ingest.sync import queue_sync, sync_manifest
from ingest.ticker import reap
from storage.catalogue.schema import Corpus, Document, Job, JobFile
from storage.errors import PathClosed

FILES = 8


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents a transaction."""
    monkeypatch.setattr(attaching, "BATCH", 3)
    monkeypatch.setattr("ingest.sync.BATCH", 3)


def planner(work: Work, folder: Path) -> SourcePlanner:
    return SourcePlanner(work.catalogue, work.objects, Reach([str(folder)]), work.pipeline.done_hash)


def source(work: Work, tmp_path: Path, files: int = FILES) -> Corpus:
    folder = tmp_path / "docs"
    folder.mkdir(exist_ok=True)
    for number in range(files):
        (folder / f"{number}.txt").write_text(f"text number{number}")
    return work.corpus(source={"type": "folder", "path": str(folder)})


def queued(work: Work, corpus: Corpus) -> str:
    with work.catalogue.write() as session:
        return queue_sync(session, session.get_one(Corpus, corpus.id)).id


def manifest(work: Work, corpus: Corpus, files: int = FILES, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """A sync of files under new names whose contents are in the corpus already."""
    entries = [Entry(f"new{n}.txt", hashlib.sha256(f"text number{n}".encode()).hexdigest(), 1) for n in range(files)]
    return sync_manifest(
        work.catalogue, lambda session: session.get_one(Corpus, corpus.id), entries,
        delete_missing=False, done_hash=work.pipeline.done_hash, names=names,
    )  # fmt: skip


def each_transaction(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[int], None] = lambda number: None) -> Counter[int]:
    """How many documents are made in each transaction; `meanwhile` is told the number of each document."""
    made: Counter[int] = Counter()

    def counted(session: Any, *given: Any, **named: Any) -> Document:
        made[session.hash_key] += 1
        meanwhile(made.total())
        return attach(session, *given, **named)

    monkeypatch.setattr(attaching, "attach", counted)
    return made


@pytest.mark.usefixtures("three")
def test_a_source_is_planned_some_documents_at_a_time_and_nobody_works_on_them_before(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = source(work, tmp_path)
    claimed: list[int] = []

    def meanwhile(number: int) -> None:
        claimed.append(work.count(JobFile, JobFile.status != "pending"))

    made = each_transaction(monkeypatch, meanwhile)
    monkeypatch.setattr(attaching, "PAUSE_SECONDS", 1.5)  # longer than a worker waits before it looks again
    job = queued(work, corpus)
    work.worker(planner=planner(work, tmp_path)).drain()
    assert sorted(made.values()) == [2, 3, 3]
    assert set(claimed) == {0}
    work.compute_kv()
    assert work.view(job)["status"] == "completed"
    assert work.view(job)["progress"]["files_done"] == FILES


@pytest.mark.usefixtures("three")
def test_a_manifest_is_planned_some_documents_at_a_time(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {f"{n}.txt": f"text number{n}" for n in range(FILES)})
    made = each_transaction(monkeypatch)
    job = manifest(work, corpus)["job_id"]
    assert sorted(made.values()) == [2, 3, 3]
    work.worker().drain()
    work.compute_kv()
    assert work.view(job)["status"] == "completed"
    assert work.count(Document) == 2 * FILES


def test_no_transaction_has_more_than_five_hundred() -> None:
    assert attaching.BATCH <= 500


@pytest.mark.usefixtures("three")
def test_an_upload_and_a_cancel_get_through_in_between(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, other = source(work, tmp_path), work.corpus("other", "t2")
    others = work.upload(other, {"a.txt": "mine"})
    seen: list[int] = []

    def write() -> None:
        with work.catalogue.write() as session:
            cancel(session, others)
        work.upload(other, {"b.txt": "mine too"})
        seen.append(made.total())

    writer = threading.Thread(target=write)
    made = each_transaction(monkeypatch, lambda number: writer.start() if number == 1 else None)
    monkeypatch.setattr(attaching, "PAUSE_SECONDS", 1.0)
    job = queued(work, corpus)
    work.worker(planner=planner(work, tmp_path)).drain()
    writer.join(60)
    assert seen
    assert seen[0] < FILES
    assert work.view(others)["status"] == "cancelled"
    assert work.view(job)["progress"]["files_done"] == FILES


@pytest.mark.usefixtures("three")
def test_a_sync_that_is_cancelled_in_between_ends_and_leaves_nothing_to_do(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = source(work, tmp_path)
    job = queued(work, corpus)

    def stop() -> None:
        with work.catalogue.write() as session:
            cancel(session, job)

    canceller = threading.Thread(target=stop)
    each_transaction(monkeypatch, lambda number: canceller.start() if number == 3 else None)
    monkeypatch.setattr(attaching, "PAUSE_SECONDS", 1.0)
    work.worker(planner=planner(work, tmp_path)).drain()
    canceller.join(60)
    assert work.view(job)["status"] == "cancelled"
    assert work.count(JobFile, JobFile.status != "cancelled") == 0
    with work.catalogue.write() as session:
        again = retry(session, job).id
    monkeypatch.undo()
    work.worker(planner=planner(work, tmp_path)).drain()
    work.compute_kv()
    assert work.view(again)["status"] == "completed"
    assert len(work.chunks(corpus)) == FILES


@pytest.mark.usefixtures("three")
def test_a_plan_that_fails_for_good_leaves_a_job_that_has_ended(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = source(work, tmp_path)

    def broken(number: int) -> None:
        if number % 5 == 0:
            raise SystemError("broken")

    each_transaction(monkeypatch, broken)
    job = queued(work, corpus)
    for _ in range(3):
        work.worker(planner=planner(work, tmp_path)).drain()
    shown = work.view(job)
    assert (shown["status"], [error["code"] for error in shown["errors"]]) == ("failed", ["worker_lost"])
    assert (work.count(JobFile), work.count(Document)) == (0, 0)


def test_a_request_that_is_refused_in_between_leaves_the_documents_as_they_were(
    work: Work, three: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {f"{n}.txt": f"text number{n}" for n in range(FILES)})

    def closed(number: int) -> None:
        if number == 5:
            raise PathClosed("new4.txt")

    each_transaction(monkeypatch, closed)
    with pytest.raises(PathClosed):
        manifest(work, corpus)
    with work.catalogue.read() as session:
        last = session.scalars(select(Job).order_by(Job.created_at.desc())).first()
        assert last is not None
        assert last.status == "failed"
    assert work.count(Document) == work.count(Document, Document.status == "completed") == FILES
    assert work.worker().drain() == 0


KILLED = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {ingest!r}]
from pathlib import Path
import test_many_documents as here
from fixtures_work import open_work
from ingest import attaching, sync
attaching.BATCH = sync.BATCH = 3
folder = Path({folder!r})
work = open_work(folder)
work.lease_seconds = 0.5
real, made = attaching.attach, []

def dies(*given, **named):
    made.append(1)
    if len(made) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*given, **named)

attaching.attach = dies
corpus = here.only_corpus(work)
{act}
"""


def only_corpus(work: Work) -> Corpus:
    with work.catalogue.read() as session:
        return session.scalars(select(Corpus)).one()


def killed(tmp_path: Path, act: str) -> None:
    tests = Path(__file__).resolve().parent.parent
    code = KILLED.format(tests=str(tests), ingest=str(tests / "ingest"), folder=str(tmp_path), act=act)
    process = subprocess.run([sys.executable, "-c", code], cwd=tests.parent, capture_output=True, timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()


def test_kill_9_in_the_middle_of_a_plan_and_another_worker_plans_it_once(work: Work, tmp_path: Path) -> None:
    corpus = source(work, tmp_path)
    job = queued(work, corpus)
    killed(tmp_path, "work.worker('doomed', here.planner(work, folder)).drain()")
    assert work.count(JobFile) == work.count(Document) == 3, "one transaction, and nothing of the second"
    assert work.worker("early").drain() == 0
    (tmp_path / "docs" / "0.txt").unlink()  # the source has changed meanwhile
    time.sleep(0.6)
    with work.catalogue.write() as session:
        assert reap(session) == {job}
    work.worker("heir", planner(work, tmp_path)).drain()
    work.compute_kv()
    shown = work.view(job)
    assert (shown["status"], shown["progress"]["files_done"], shown["attempt"]) == ("completed", FILES - 1, 2)
    assert sorted(work.chunks(corpus)) == [f"text number{n}" for n in range(1, FILES)]
    assert work.count(Document) == work.count(JobFile) == FILES - 1
    with work.catalogue.read() as session:
        assert len(session.get_one(Job, job).result["sync"]["added"]) == FILES - 1


def test_kill_9_in_the_middle_of_a_request_and_the_request_that_is_sent_again_does_it_once(work: Work, tmp_path: Path) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {f"{n}.txt": f"text number{n}" for n in range(FILES)})
    work.compute_kv()
    killed(tmp_path, "here.manifest(work, corpus)")
    other = open_work(tmp_path)
    with work.catalogue.read() as session:
        [unfinished] = session.scalars(select(Job).where(Job.finished_at.is_(None)))
    assert work.count(JobFile, JobFile.job_id == unfinished.id) == 3
    assert other.worker("early").drain() == 0
    with work.catalogue.write() as session:
        session.get_one(Job, unfinished.id).lease_expires = time.time() - 1
    with work.catalogue.write() as session:
        assert reap(session) == {unfinished.id}
    shown = work.view(unfinished.id)
    assert shown["status"] == "failed"
    assert "send it again" in shown["errors"][0]["message"]
    assert work.count(Document) == work.count(Document, Document.status == "completed") == FILES
    job = manifest(work, corpus)["job_id"]
    work.worker().drain()
    work.compute_kv()
    assert work.view(job)["status"] == "completed"
    assert work.count(Document, Document.generation == 1) == 2 * FILES
    other.catalogue.close()
