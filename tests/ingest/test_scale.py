"""What one turn costs does not grow with the number of a job's files. Counted in steps of SQLite's machine, which a busy
computer does not change."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from big_jobs import big_job
from fixtures_work import Work
from sqlalchemy import event, insert, select, update
from sqlalchemy.orm import Session

from ingest.job_view import MOST_ERRORS, view
from ingest.jobs import cancel, retry, settle
from ingest.leases import claim_file, finish, owned
from ingest.sync import offer
from precompute import rows
from storage.catalogue.schema import Document, File, Job, JobFile, KVObject

MANY = 20_000


class Steps:
    count = 0


@contextmanager
def counted(work: Work) -> Iterator[Steps]:
    """Steps of SQLite's virtual machine in the block, in tens."""
    steps = Steps()

    def tick() -> int:
        steps.count += 1
        return 0

    def watch(session: Session, transaction: object, connection: object) -> None:
        connection.connection.driver_connection.set_progress_handler(tick, 10)  # type: ignore[attr-defined]

    event.listen(Session, "after_begin", watch)
    try:
        yield steps
    finally:
        event.remove(Session, "after_begin", watch)
        work.catalogue.engine.dispose()


def a_turn(work: Work, job_id: str) -> None:
    """A file claimed and ended, as a worker does it."""
    lease = claim_file(work.catalogue, "w", 60)
    assert lease is not None
    with work.catalogue.write() as session:
        finish(session, owned(session, lease), "done")
        assert not settle(session, job_id)


@pytest.mark.parametrize("done", [0, MANY - 300], ids=["at the start", "near the end"])
def test_a_turn_in_a_job_of_twenty_thousand_files_costs_what_it_costs_in_a_small_one(work: Work, done: int) -> None:
    costs = []
    for files in (300, MANY):
        job = big_job(work, work.corpus(f"c{files}"), files)
        with work.catalogue.write() as session:
            some = select(JobFile.id).where(JobFile.job_id == job).limit(min(done, files - 300))
            session.execute(update(JobFile).where(JobFile.id.in_(some)).values(status="done"))
        with counted(work) as steps:
            a_turn(work, job)
        costs.append(steps.count)
        with work.catalogue.write() as session:
            session.execute(update(Job).where(Job.id == job).values(status="completed"))
    assert costs[1] < 3 * costs[0] + 50, costs


def test_an_upload_finds_the_sync_that_waits_for_it_among_twenty_thousand_files(work: Work) -> None:
    corpus = work.corpus()
    job = big_job(work, corpus, MANY, file_id=None)
    with work.catalogue.write() as session:
        session.execute(update(JobFile).values(sha256=JobFile.path))
        file = File(id="f", tenant_id="t1", filename="n", bytes=1, sha256=f"{job}/777.txt", purpose="x", created_at=0.0)
        session.add(file)
    with counted(work) as steps, work.catalogue.write() as session:
        assert offer(session, file) == {job}
    assert steps.count < 200
    assert work.count(JobFile, JobFile.file_id == "f") == 1


def test_a_job_of_twenty_thousand_files_is_cancelled_with_all_that_waits(work: Work) -> None:
    job = big_job(work, work.corpus(), MANY)
    statements = []
    event.listen(work.catalogue.engine, "before_cursor_execute", lambda c, cur, statement, *rest: statements.append(statement))
    with work.catalogue.write() as session:
        session.execute(update(Document).where(Document.id == f"{job}-5").values(generation=2))
        cancel(session, job)
    assert len(statements) < 200, "not one statement for each file"
    assert work.view(job)["status"] == "cancelled"
    assert work.count(Document, Document.status == "cancelled") == MANY - 1
    assert work.count(Document, Document.status == "completed") == 1, "what holds an older content keeps it"
    assert work.count(JobFile, JobFile.error_code == "cancelled") == MANY


def test_a_job_names_some_of_its_errors_and_counts_and_retries_all(work: Work) -> None:
    corpus = work.corpus()
    job = big_job(work, corpus, 3000, status="failed", error_code="storage_error", error_message="m")
    with work.catalogue.write() as session:
        assert settle(session, job)
    shown = work.view(job)
    assert (shown["status"], shown["progress"]["files_failed"], len(shown["errors"])) == ("failed", 3000, MOST_ERRORS)
    with work.catalogue.write() as session:
        again = retry(session, job).id
    assert work.view(again)["progress"]["files_total"] == 3000


def test_showing_a_job_reads_each_of_its_files_once(work: Work) -> None:
    def cost(look: Callable[[Session, Job], object], files: int) -> float:
        job = big_job(work, work.corpus(f"c{files}"), files)
        with counted(work) as steps, work.catalogue.read() as session:
            look(session, session.get_one(Job, job))
        return steps.count / files

    assert cost(view, MANY) < 1.5 * cost(view, 1000) < 10, "tens of steps for each file, to count it"


def test_a_turn_of_the_kv_queue_costs_the_same_however_many_rows_are_done(work: Work) -> None:
    corpus = work.corpus()
    job = work.ingest(corpus, {"a.txt": "one text"})
    base = {"tenant_id": "t1", "sharing_group": "t1", "job_id": job, "tokens": 5, "bytes": 1, "attempt": 0, "created_at": 0.0}
    costs = []
    for number in (0, MANY):
        if number:
            with work.catalogue.write() as session:
                session.execute(update(KVObject).values(status="pending", lease_owner=None, lease_expires=None))
                session.execute(insert(KVObject), [{**base, "key": f"k{i}", "status": "done"} for i in range(number)])
        with counted(work) as steps, work.catalogue.write() as session:
            batch = rows.claim(session, "w", 60, 100, None)
            assert batch is not None
            assert len(batch.rows) == 1
            assert not settle(session, job)
        costs.append(steps.count)
    assert costs[1] < 3 * costs[0] + 50, costs


# A process that stores a file of 300 MB and reads it back, and says by how many MB that has made it grow.
STORE = """
import resource, sys, time
from pathlib import Path
from sqlalchemy import insert
from ingest.expand import Unpacked, unpack
from ingest.files import open_file, store_file
from storage.catalogue.engine import open_catalogue
from storage.folder import FolderStore

catalogue, objects = open_catalogue(f"sqlite:///{sys.argv[1]}/catalogue.db"), FolderStore(sys.argv[1] + "/objects")
store_file(catalogue, objects, "t1", "small", b"warm")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
with open(sys.argv[2], "rb") as stream:
    file = store_file(catalogue, objects, "t1", "large", stream)
with open_file(objects, file) as stream:
    if sys.argv[3] == "unpack":
        found = Unpacked()
        unpack(catalogue, objects, "t1", "large.tar", stream, lambda: None, found)
        assert len(found.files) == 300
print(peak() - before)
"""


@pytest.mark.parametrize("then", ["read", "unpack"])
def test_a_large_file_is_stored_read_and_unpacked_piece_by_piece(work: Work, tmp_path: Path, then: str) -> None:
    work.corpus()
    large = tmp_path / "large.tar"
    with tarfile.open(large, "w") as archive:
        for number in range(300):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = 1 << 20
            archive.addfile(info, io.BytesIO(b"%8d" % number * (1 << 17)))
    command = [sys.executable, "-c", STORE, str(tmp_path), str(large), then]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert int(grown.stdout) < 40, f"{grown.stdout.strip()} MB for a file of 300 MB"
