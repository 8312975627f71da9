"""The database locked by somebody else, and the disk full: nothing is stored half, and the work goes on afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures_work import Work, make_work, paragraphs
from sqlalchemy import event, text, update

from ingest.jobs import retry
from ingest.ticker import reap
from storage.catalogue import engine
from storage.catalogue.schema import ChunkRow, Document, Job, JobFile
from storage.catalogue.sqlite import driver
from storage.errors import Overloaded, StorageUnavailable


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """A whole that waits for the database's lock for a fifth of a second."""
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.2)
    made = make_work(tmp_path)
    yield made
    made.catalogue.close()


def until_done(work: Work, job: str) -> dict[str, Any]:
    """Work as workers and the beat do, whatever the catalogue refuses."""
    for _ in range(200):
        try:
            work.worker().drain()
            with work.catalogue.write() as session:
                session.execute(update(JobFile).where(JobFile.status == "pending").values(lease_expires=None))
                reap(session)
            work.compute_kv()
            if work.view(job)["finished_at"]:
                return work.view(job)
        except (Overloaded, StorageUnavailable):
            pass
        time.sleep(0.1)
    raise AssertionError(work.view(job))


def test_a_database_that_another_process_keeps_locked_delays_a_job_and_loses_nothing(impatient: Work, tmp_path: Path) -> None:
    work = impatient
    work.lease_seconds = 1.0
    corpus = work.corpus()
    job = work.upload(corpus, {f"{i}.txt": paragraphs(3, tag=f"t{i}x") for i in range(4)})
    freed = threading.Event()

    def lock(name: str) -> None:
        if name != "1.txt" or freed.is_set():
            return

        def hold() -> None:
            other = driver().connect(tmp_path / "catalogue.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            locked.set()
            time.sleep(1.5)
            other.execute("ROLLBACK")
            other.close()
            freed.set()

        locked = threading.Event()
        threading.Thread(target=hold).start()
        assert locked.wait(5)

    work.parser.accident = lock
    shown = until_done(work, job)
    assert freed.is_set()
    assert shown["status"] == "completed"
    assert work.count(ChunkRow) == 12, "each chunk once"
    assert work.count(Document, Document.generation == 1) == 4


def test_a_full_disk_of_the_catalogue_is_a_refusal_and_the_job_ends_when_there_is_room(work: Work) -> None:
    corpus = work.corpus()
    job = work.upload(corpus, {f"{i}.txt": paragraphs(30, tag=f"t{i}x") for i in range(4)})
    with work.catalogue.write() as session:
        session.execute(update(Job).values(max_attempts=1000))  # a disk that is full for long uses up attempts
        room = (session.scalar(text("PRAGMA page_count")) or 0) + 2
    limit = [room]

    def cap(connection: Any, record: Any, proxy: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {limit[0]}")

    event.listen(work.catalogue.engine, "checkout", cap)
    work.catalogue.engine.dispose()
    refused = []

    def fill() -> None:
        with work.catalogue.write() as session:
            session.execute(text("CREATE TABLE ballast AS SELECT zeroblob(1000000)"))

    with pytest.raises(StorageUnavailable, match="disk is full"):
        fill()
    for _ in range(3):
        try:
            work.worker().drain()
        except (Overloaded, StorageUnavailable) as error:
            refused.append(error)
    assert work.count(ChunkRow) == work.count(Document, Document.generation > 0) * 30, "whole documents or none"
    assert work.count(Document, Document.generation > 0) < 4
    limit[0] = 1 << 30
    shown = until_done(work, job)
    assert shown["status"] == "completed", shown["errors"]
    assert work.count(ChunkRow) == 120


def test_a_disk_of_the_catalogue_that_stays_full_fails_files_as_storage_error_and_a_retry_completes_them(work: Work) -> None:
    corpus = work.corpus()
    job = work.upload(corpus, {f"{i}.txt": paragraphs(30, tag=f"t{i}x") for i in range(4)})
    with work.catalogue.read() as session:
        limit = [(session.scalar(text("PRAGMA page_count")) or 0) + 2]

    def cap(connection: Any, record: Any, proxy: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {limit[0]}")

    event.listen(work.catalogue.engine, "checkout", cap)
    work.catalogue.engine.dispose()
    for _ in range(20):
        try:
            work.worker().drain()
            with work.catalogue.write() as session:
                session.execute(update(JobFile).where(JobFile.status == "pending").values(lease_expires=None))
        except (Overloaded, StorageUnavailable):
            pass
    work.compute_kv()
    shown = work.view(job)
    lost = {error["filename"]: (error["code"], error["retryable"]) for error in shown["errors"]}
    assert shown["status"] in ("failed", "completed_with_errors")
    assert lost
    assert set(lost.values()) == {("storage_error", True)}
    assert shown["attempt"] == shown["max_attempts"] == 3
    assert work.count(ChunkRow) == 30 * (4 - len(lost)), "whole documents or none"
    limit[0] = 1 << 30
    work.catalogue.engine.dispose()
    with work.catalogue.write() as session:
        again = retry(session, job).id
    shown = until_done(work, again)
    assert (shown["status"], shown["progress"]["files_total"]) == ("completed", len(lost))
    assert work.count(ChunkRow) == 120
