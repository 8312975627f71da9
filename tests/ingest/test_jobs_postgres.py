"""The same queues on PostgreSQL, where workers really work at the same time."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_work import Work, open_work, paragraphs
from sqlalchemy import update
from sqlalchemy.exc import NoResultFound

from ingest import schedules
from ingest.files import raw_name, read_file, store_file
from ingest.garbage import PARTS, collect
from ingest.jobs import cancel
from ingest.purge import sweep
from ingest.schedules import create_schedule
from ingest.ticker import Ticker, reap
from precompute import rows
from storage.catalogue.schema import Corpus, Document, Job, JobFile, KVObject, ScheduleRun
from storage.errors import Overloaded
from storage.kvstore import KVStore

pytestmark = pytest.mark.services
WORKERS = 4


@pytest.fixture
def works(tmp_path: Path, postgres_catalogue: str) -> Iterator[list[Work]]:
    made = [open_work(tmp_path, postgres_catalogue) for _ in range(WORKERS)]
    yield made
    for work in made:
        work.catalogue.close()


def together(works: list[Work], do: object) -> None:
    """Run `do(work)` in a thread each, and raise what any of them raised."""
    errors: list[BaseException] = []

    def run(work: Work) -> None:
        try:
            do(work)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_workers_share_a_job_and_each_file_is_done_once(works: list[Work]) -> None:
    work = works[0]
    corpus = work.corpus()
    shared = paragraphs(2, tag="shared")
    files = {f"{i}.txt": f"{shared}\n\n{paragraphs(2, tag=f'f{i}x')}" for i in range(12)}
    job = work.upload(corpus, files)
    together(works, lambda w: w.worker(f"w{id(w)}").drain())
    assert sum(len(w.parser.parsed) for w in works) == 12
    assert len(work.chunks(corpus)) == 48
    assert work.count(KVObject) == 2 + 24
    assert work.view(job)["progress"]["files_done"] == 12
    assert work.count(JobFile, JobFile.attempt > 0) == 0, "commits into one corpus do not lock each other out"

    def compute(w: Work) -> None:
        while True:
            with w.catalogue.write() as session:
                batch = rows.claim(session, "kv", 60, 40, None)
            if batch is None or not batch.rows:
                return
            with w.catalogue.write() as session:
                rows.mark_done(session, batch, {row.key: 10 for row in batch.rows}, 0.1)

    together(works, compute)
    compute(work)  # what another had locked when one looked
    Ticker(work.catalogue, work.rung.append, work.delete_kv, rows.reap, rows.has_work, lambda: None).tick()
    shown = work.view(job)
    assert (shown["status"], shown["progress"]["chunks_computed"]) == ("completed", 26)
    assert shown["progress"]["kv_bytes_written"] == 260


def test_replacing_and_deleting_at_the_same_time_leaves_no_orphan(works: list[Work]) -> None:
    work = works[0]
    corpus = work.corpus()
    for turn in range(3):
        for i, w in enumerate(works):
            w.upload(corpus, {f"{i}.txt": paragraphs(3, tag=f"t{turn}x")})
        together(works, lambda w: w.worker(f"w{id(w)}").drain())
    with work.catalogue.write() as session:
        session.execute(update(JobFile).where(JobFile.status == "leased").values(lease_expires=0.0))
        reap(session)
    work.worker().drain()
    assert sorted(set(work.chunks(corpus))) == sorted(paragraphs(3, tag="t2x").split("\n\n"))
    assert work.count(KVObject, KVObject.status != "purge") == 3
    work.deleter.corpus("t1", corpus.id)
    assert (work.count(Document), work.count(KVObject)) == (0, 0)


def test_a_corpus_that_others_add_to_is_deleted_and_who_comes_too_late_hears_of_it(works: list[Work]) -> None:
    work = works[0]
    corpus = work.corpus()
    begun = threading.Barrier(WORKERS)

    def add_or_delete(w: Work) -> None:
        begun.wait(30)
        while True:
            try:
                if w is work:
                    w.deleter.corpus("t1", corpus.id)
                    return
                w.upload(corpus, {f"{id(w)}.txt": "text", "shared.txt": "text"})
            except Overloaded:
                continue
            except NoResultFound:
                return  # there is no corpus

    together(works, add_or_delete)
    assert (work.count(Corpus), work.count(Document)) == (0, 0)


def test_a_schedule_fires_once_and_a_cancelled_job_ends(works: list[Work], tmp_path: Path) -> None:
    work = works[0]
    corpus = work.corpus(source={"type": "folder", "path": str(tmp_path)})
    with work.catalogue.write() as session:
        create_schedule(session, session.get_one(Corpus, corpus.id), "* * * * *").next_due_at = (
            time.time() - 1
        )
    now = time.time()
    together(works, lambda w: schedules.tick(w.catalogue, now, w.rung.append))
    assert work.count(ScheduleRun) == work.count(Job) == 1
    job = work.upload(corpus, {"a.txt": "text"})
    with work.catalogue.write() as session:
        cancel(session, job)
    assert work.view(job)["status"] == "cancelled"


def test_an_upload_and_the_collection_of_its_orphan_at_the_same_time_keep_the_bytes(works: list[Work]) -> None:
    """The upload finds its bytes there already, and they are deleted before its row is written."""
    collecting, uploading = works[0], works[1]
    data, uploads = b"the same bytes again", []
    collecting.corpus()
    name = raw_name("t1", hashlib.sha256(data).hexdigest())
    collecting.objects.put(name, [data])
    delete_many = collecting.objects.delete_many

    def upload() -> None:
        uploads.append(store_file(uploading.catalogue, uploading.objects, "t1", "a.txt", data))

    thread = threading.Thread(target=upload)

    def delete_while_uploading(names: list[str]) -> dict[str, str]:
        thread.start()
        time.sleep(0.5)
        assert not uploads, "its row must wait"
        return delete_many(names)

    collecting.objects.delete_many = delete_while_uploading
    for part in PARTS:
        if name.startswith(part):
            assert collect(collecting.catalogue, collecting.objects, part, grace_s=-5).taken == 1
    thread.join()
    assert read_file(uploading.objects, uploads[0]) == data


def test_orphans_go_from_several_processes_at_once(works: list[Work]) -> None:
    objects = works[0].objects
    keys = [f"ab{number:062}" for number in range(20)]
    for key in keys:
        objects.put(f"kv/ab/{key}", [b"x"])
    together(works, lambda w: collect(w.catalogue, w.objects, "kv/ab/", grace_s=-5))
    assert works[0].count(KVObject, KVObject.status == "purge") == 20
    together(works, lambda w: sweep(w.catalogue, KVStore(w.objects).delete))
    assert list(objects.list("")) == []
    assert works[0].count(KVObject) == 0
