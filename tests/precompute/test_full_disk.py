"""The disk of the object folder is full while a job writes contents or KV: an error that says so, nothing half, and once there
is room the work goes on or can be tried again."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures_work import Work, paragraphs, zipped_texts
from sqlalchemy import select, update
from test_queue import TinyReader, make_queue

from ingest.files import SOURCE_PURPOSE, store_file
from ingest.jobs import queue_refresh, retry
from ingest.planner import SourcePlanner
from ingest.sources import Reach
from ingest.sync import queue_sync
from ingest.ticker import reap
from storage import folder
from storage.catalogue.schema import Corpus, Document, File, Job, JobFile, KVObject
from storage.errors import StorageUnavailable
from storage.folder import FolderStore
from storage.kvstore import KVStore


@dataclass
class Disk:
    fill: Callable[[], None]
    free: Callable[[], None]


@pytest.fixture(params=["a file system of two megabytes", "an error of the system"])
def disk(request: pytest.FixtureRequest, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """That of the object folder."""
    if request.param == "an error of the system":
        full, write = [False], folder._write_synced

        def refuse(*given: Any) -> Any:
            if full[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*given)

        monkeypatch.setattr(folder, "_write_synced", refuse)
        yield Disk(lambda: full.__setitem__(0, True), lambda: full.__setitem__(0, False))
        return
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    try:
        work.objects = FolderStore(place / "objects")
        yield Disk(lambda: ballast(place), lambda: (place / "ballast").unlink())
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def ballast(place: Path) -> None:
    with (place / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def work_on(work: Work, times: int = 6, planner: Any = None) -> None:
    """As workers and the beat do, for whom time passes between."""
    for _ in range(times):
        work.worker(planner=planner).drain()
        with work.catalogue.write() as session:
            session.execute(update(JobFile).where(JobFile.status == "pending").values(lease_expires=None))
            session.execute(update(Job).where(Job.lease_owner.is_(None)).values(lease_expires=None))
            reap(session)


def again(work: Work, job: str) -> str:
    with work.catalogue.write() as session:
        return retry(session, job).id


def test_an_upload_is_refused_and_leaves_nothing(work: Work, disk: Disk) -> None:
    work.corpus()
    disk.fill()
    with pytest.raises(StorageUnavailable):
        store_file(work.catalogue, work.objects, "t1", "a.txt", b"text")
    assert work.count(File) == 0
    disk.free()
    store_file(work.catalogue, work.objects, "t1", "a.txt", b"text")


def test_an_archive_that_cannot_be_unpacked_is_a_storage_error_and_a_retry_completes_it(work: Work, disk: Disk) -> None:
    job = work.upload(work.corpus(), {"a.zip": zipped_texts(m="one", n="two"), "b.txt": "three"})
    disk.fill()
    work_on(work)
    work.compute_kv()
    shown = work.view(job)
    [error] = shown["errors"]
    assert (error["filename"], error["code"], error["retryable"]) == ("a.zip", "storage_error", True)
    assert shown["status"] == "completed_with_errors"
    assert work.count(File, File.purpose == SOURCE_PURPOSE) == 0
    disk.free()
    second = again(work, job)
    work_on(work, 1)
    work.compute_kv()
    assert work.view(second)["status"] == "completed"
    assert sorted(work.chunks()) == ["one", "three", "two"]


def test_a_sync_whose_contents_cannot_be_stored_fails_with_storage_error_and_a_retry_completes_it(
    work: Work, disk: Disk, tmp_path: Path
) -> None:
    root = tmp_path / "docs"
    root.mkdir()
    (root / "a.txt").write_text("one")
    corpus = work.corpus(source={"type": "folder", "path": str(root)})
    planner = SourcePlanner(work.catalogue, work.objects, Reach([str(root)]), work.pipeline.done_hash)
    with work.catalogue.write() as session:
        job = queue_sync(session, session.get_one(Corpus, corpus.id)).id
    disk.fill()
    work_on(work, planner=planner)
    shown = work.view(job)
    assert (shown["status"], [error["code"] for error in shown["errors"]]) == ("failed", ["storage_error"])
    assert shown["attempt"] == shown["max_attempts"]
    disk.free()
    second = again(work, job)
    work_on(work, 1, planner)
    work.compute_kv()
    assert work.view(second)["status"] == "completed"
    assert work.chunks() == ["one"]


def test_kv_waits_for_room_and_is_stored_once(work: Work, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    job = work.ingest(work.corpus(), {"a.txt": paragraphs(5)})
    store, reader = KVStore(work.objects), TinyReader()
    queue = make_queue(work, store, reader)
    disk.fill()
    for _ in range(5):  # more often than a row may fail
        queue.drain()
        with work.catalogue.write() as session:
            session.execute(update(KVObject).values(lease_expires=None))
    shown = work.view(job)
    assert (shown["status"], shown["stage"], shown["errors"]) == ("in_progress", "kv", [])
    assert not list(work.objects.list("kv/"))
    assert len(work.chunks()) == 5, "searchable all the while"
    disk.free()
    queue.drain()
    shown = work.view(job)
    assert shown["status"] == "completed"
    assert shown["progress"]["chunks_computed"] == work.count(KVObject, KVObject.status == "done") == 5
    assert len(list(work.objects.list("kv/"))) == 5


def test_an_update_that_finds_the_disk_full_leaves_the_old_text(work: Work, disk: Disk) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.zip": zipped_texts(m="old text")})
    job = work.upload(corpus, {"a.zip": zipped_texts(m="new text", n="more")})
    disk.fill()
    work_on(work)
    assert work.view(job)["status"] == "failed"
    assert work.chunks(corpus) == ["old text"]
    with work.catalogue.read() as session:
        assert set(session.scalars(select(Document.path))) == {"a.zip", "a.zip!/m.txt"}
    disk.free()
    with work.catalogue.write() as session:
        queue_refresh(session, session.get_one(Corpus, corpus.id), session.query(Document).filter(Document.path == "a.zip"))
    work_on(work, 1)
    assert work.chunks(corpus) == ["old text"], "a refresh is of what the document holds"
    again(work, job)
    work_on(work, 1)
    assert sorted(work.chunks(corpus)) == ["more", "new text"]
