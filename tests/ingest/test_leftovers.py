"""What was stored for a document that never came: nothing of it stays. And archives wherever they come from."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from fixtures_work import Work, zipped_texts
from git_kit import git
from sqlalchemy import update

from ingest import planner as planning
from ingest.files import PART, SOURCE_PURPOSE, delete_file, raw_name, store_file
from ingest.garbage import EVERY_SECONDS, LEFT_EVERY, LEFT_SECONDS, PARTS, Collector, drop_leftovers
from ingest.planner import SourcePlanner
from ingest.sources import Reach
from ingest.sync import queue_sync
from storage.catalogue.schema import Corpus, Document, File, Job, JobFile, Upload


def tarred(**files: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{name}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()


def planner(work: Work, folder: Path) -> SourcePlanner:
    return SourcePlanner(work.catalogue, work.objects, Reach([str(folder)]), work.pipeline.done_hash)


def synced(work: Work, corpus: Corpus, folder: Path) -> str:
    with work.catalogue.write() as session:
        job = queue_sync(session, session.get_one(Corpus, corpus.id)).id
    work.worker(planner=planner(work, folder)).drain()
    work.compute_kv()
    return job


def paths(work: Work) -> list[str]:
    with work.catalogue.read() as session:
        return sorted(row.path for row in session.query(Document))


def age(work: Work) -> None:
    """Let all files be of yesterday."""
    with work.catalogue.write() as session:
        session.execute(update(File).values(created_at=time.time() - 24 * 3600))


@pytest.mark.parametrize("kind", ["folder", "git"])
def test_archives_in_a_source_are_unpacked_as_uploads_are(work: Work, tmp_path: Path, kind: str) -> None:
    root = tmp_path / "docs"
    root.mkdir()
    for name, data in {
        "a.zip": zipped_texts(m="one", n="two"), "deep.tgz": tarred(t="three"), "plain.txt": b"four",
        "log.gz": gzip.compress(b"no tar " * 200), "old.7z": b"7z\xbc\xaf\x27\x1c" + b"\0" * 40, "image.png": b"\x89PNG\0\0",
    }.items():  # fmt: skip
        (root / name).write_bytes(data)
    if kind == "git":
        git(root, "init", "-q", "-b", "main")
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", "one")
    corpus = work.corpus(source={"type": kind, "path": str(root)})
    job = synced(work, corpus, tmp_path)
    assert paths(work) == ["a.zip", "a.zip!/m.txt", "a.zip!/n.txt", "deep.tgz", "deep.tgz!/t.txt", "plain.txt"]
    assert work.chunks(corpus) == ["one", "two", "three", "four"]
    with work.catalogue.read() as session:
        skipped = session.get_one(Job, job).result["sync"]["skipped"]
    left = {each["path"]: each["reason"] for each in skipped if each["path"] != ".git"}
    no_tar = "an archive that is neither zip nor tar"
    assert left == {"log.gz": no_tar, "old.7z": no_tar, "image.png": "binary"}
    again = synced(work, corpus, tmp_path)
    assert work.view(again)["progress"]["files_total"] == 0, "nothing has changed, in the archives neither"


def test_an_archive_that_leaves_its_source_takes_its_files_along(work: Work, tmp_path: Path) -> None:
    root = tmp_path / "docs"
    root.mkdir()
    (root / "a.zip").write_bytes(zipped_texts(m="one", n="two"))
    (root / "b.txt").write_text("stays")
    corpus = work.corpus(source={"type": "folder", "path": str(root)})
    synced(work, corpus, tmp_path)
    (root / "a.zip").write_bytes(zipped_texts(m="one"))
    synced(work, corpus, tmp_path)
    assert work.chunks(corpus) == ["one", "stays"]
    (root / "a.zip").unlink()
    synced(work, corpus, tmp_path)
    assert paths(work) == ["b.txt"]
    with work.catalogue.read() as session:
        assert sorted(work.objects.list("raw/")) == sorted(raw_name("t1", file.sha256) for file in session.query(File))


def test_the_files_of_an_archive_go_when_a_text_takes_its_path(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a": zipped_texts(m="the old limit is ten")})
    assert "the old limit is ten" in work.chunks(corpus)
    work.ingest(corpus, {"b": "other", "b!/c.txt": "stays too"})
    work.ingest(corpus, {"a": "the new limit is twenty", "b": "changed"})
    assert work.chunks(corpus) == ["the new limit is twenty", "changed", "stays too"]
    assert work.search(corpus, "old limit ten")[1] == ["the new limit is twenty"]


def test_a_folder_called_like_what_is_in_an_archive_is_a_folder(work: Work, tmp_path: Path) -> None:
    root = tmp_path / "docs"
    (root / "a!").mkdir(parents=True)
    (root / "a").write_text("a text and no archive")
    (root / "a!" / "b.txt").write_text("inside")
    corpus = work.corpus(source={"type": "folder", "path": str(root)})
    synced(work, corpus, tmp_path)
    assert work.view(synced(work, corpus, tmp_path))["progress"]["files_total"] == 0, "it is known"
    (root / "a").unlink()
    synced(work, corpus, tmp_path)
    assert paths(work) == ["a!/b.txt"]
    (root / "a!" / "b.txt").unlink()
    (root / "c.txt").write_text("last")
    synced(work, corpus, tmp_path)
    assert paths(work) == ["c.txt"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from fixtures_work import open_work
from ingest.leases import claim_file
work = open_work(Path(sys.argv[1]))
work.pipeline.begin(claim_file(work.catalogue, "doomed", 0.1)).waits_for.result(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_worker_had_unpacked_is_found_and_forgotten(work: Work, tmp_path: Path) -> None:
    corpus = work.corpus()
    work.upload(corpus, {"a.zip": zipped_texts(m="one", n="two")})
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, check=False, timeout=300).returncode == -9
    assert work.count(File, File.purpose == SOURCE_PURPOSE) == 2
    with work.catalogue.write() as session:
        session.execute(update(JobFile).values(status="failed", error_code="worker_lost"))
    assert drop_leftovers(work.catalogue, work.objects) == 0, "whoever stored them may still be at it"
    age(work)
    assert drop_leftovers(work.catalogue, work.objects) == 2
    assert work.count(File) == 1
    assert len([*work.objects.list("raw/")]) == 1


def test_what_a_document_a_job_or_an_upload_needs_is_no_leftover(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.zip": zipped_texts(m="one")})
    work.upload(corpus, {"b.zip": zipped_texts(n="two")})
    waiting = store_file(work.catalogue, work.objects, "t1", "w", b"waits", SOURCE_PURPOSE)
    part = store_file(work.catalogue, work.objects, "t1", "p", b"part", PART + "u1")
    store_file(work.catalogue, work.objects, "t1", "q", b"refused", PART + "nobody")
    now = time.time()
    with work.catalogue.write() as session:
        session.execute(update(JobFile).where(JobFile.status == "pending").values(file_id=waiting.id))
        session.add(
            Upload(id="u1", tenant_id="t1", filename="f", bytes=4, purpose="x", status="pending", created_at=now, expires_at=now)
        )
    age(work)
    assert drop_leftovers(work.catalogue, work.objects) == 1
    with work.catalogue.read() as session:
        kept = {file.filename for file in session.query(File)}
        assert session.get(File, part.id) is not None
    assert kept == {"a.zip", "a.zip!/m.txt", "b.zip", "w", "p"}


def test_the_tick_looks_for_leftovers_now_and_then(work: Work) -> None:
    work.corpus()
    store_file(work.catalogue, work.objects, "t1", "x", b"left", SOURCE_PURPOSE)
    age(work)
    clock = [0.0]
    collector = Collector(work.catalogue, lambda: work.objects, lambda: clock[0])
    for _ in range(LEFT_EVERY + 1):
        clock[0] += EVERY_SECONDS
        collector.tick()
    assert work.count(File) == 0
    assert LEFT_EVERY < len(PARTS)
    assert LEFT_SECONDS > 0


def test_a_file_that_is_deleted_while_its_sync_is_planned_is_stored_again(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "docs"
    root.mkdir()
    (root / "a.txt").write_text("words")
    corpus = work.corpus(source={"type": "folder", "path": str(root)})
    deleted: list[str] = []

    def store(*given: Any) -> File:
        file = store_file(*given)
        if not deleted:  # as the end of another commit does, which has let go of the same file
            deleted.append(file.id)
            delete_file(work.catalogue, work.objects, "t1", file.id)
        return file

    monkeypatch.setattr(planning, "store_file", store)
    with work.catalogue.write() as session:
        job = queue_sync(session, session.get_one(Corpus, corpus.id)).id
    worker = work.worker(planner=planner(work, tmp_path))
    worker.drain()
    assert work.count(Document) == 0
    with work.catalogue.write() as session:
        session.execute(update(Job).values(lease_expires=None))
    worker.drain()
    work.compute_kv()
    assert work.view(job)["status"] == "completed"
    assert work.chunks(corpus) == ["words"]
