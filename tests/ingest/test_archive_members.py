"""The stored files of an archive's members: none is lost, none is left over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fixtures_work import Work, zipped_texts

from ingest import expand, files, pipeline
from ingest.files import SOURCE_PURPOSE, drop_source_files, store_file
from ingest.jobs import cancel
from ingest.leases import claim_file
from ingest.ticker import reap
from storage.catalogue.schema import File, JobFile
from storage.errors import FileError, StorageUnavailable


def begun(work: Work) -> Any:
    lease = claim_file(work.catalogue, "w1", 5.0)
    assert lease is not None
    return work.pipeline.begin(lease)


def due_now(work: Work) -> None:
    with work.catalogue.write() as session:
        session.query(JobFile).filter(JobFile.status == "pending").update({"lease_expires": None})


def test_a_file_that_is_deleted_between_unpacking_and_commit_is_unpacked_again(work: Work) -> None:
    corpus = work.corpus()
    old = store_file(work.catalogue, work.objects, "t1", "a.zip!/m.txt", b"one", SOURCE_PURPOSE)
    work.upload(corpus, {"a.zip": zipped_texts(m="one", n="two")})
    run = begun(work)
    run.waits_for.result(60)
    drop_source_files(work.catalogue, work.objects, "t1", [old.id])  # as another commit's end does
    run.finish()
    assert work.count(JobFile) == 1
    due_now(work)
    work.worker().drain()
    assert work.chunks(corpus) == ["one", "two"]
    assert work.count(JobFile, JobFile.status == "done") == 3


def fails_at_the_end(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise FileError("as asked", code="invalid_file")

    monkeypatch.setattr(pipeline, "commit_members", fail)
    begun(work).finish()


def fails_while_it_is_unpacked(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[str] = []

    def store(*given: Any) -> File:
        if stored:
            raise StorageUnavailable("as asked")
        stored.append(given[3])
        return store_file(*given)

    monkeypatch.setattr(expand, "store_file", store)
    begun(work).finish()
    assert stored


def is_cancelled_while_it_waits(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(work)
    with work.catalogue.write() as session:
        cancel(session, session.query(JobFile).one().job_id)
    while not run.ended:
        run.look()
        time.sleep(0.01)


def is_left(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(work).leave()


@pytest.mark.parametrize("accident", [fails_at_the_end, fails_while_it_is_unpacked, is_cancelled_while_it_waits, is_left])
def test_an_archive_that_is_not_committed_leaves_no_files(
    work: Work, monkeypatch: pytest.MonkeyPatch, accident: Callable[..., None]
) -> None:
    work.upload(work.corpus(), {"a.zip": zipped_texts(m="one", n="two")})
    with monkeypatch.context() as patch:
        accident(work, patch)

    def names() -> list[str]:
        with work.catalogue.read() as session:
            return [file.filename for file in session.query(File)]

    end = time.monotonic() + 30
    while names() != ["a.zip"] and time.monotonic() < end:
        time.sleep(0.02)  # a cancelled job's files go from a thread beside
    assert names() == ["a.zip"]
    assert len([*work.objects.list("raw/")]) == 1


def test_what_is_needed_elsewhere_stays_when_an_archive_fails(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.zip": zipped_texts(m="one", n="two")})
    work.upload(corpus, {"a.zip": zipped_texts(m="one", n="changed")})
    with monkeypatch.context() as patch:
        fails_at_the_end(work, patch)
    with work.catalogue.read() as session:
        names = sorted(file.filename for file in session.query(File))
    assert names == ["a.zip", "a.zip", "a.zip!/m.txt", "a.zip!/n.txt"]
    assert work.chunks(corpus) == ["one", "two"]


def test_a_store_that_does_not_answer_is_asked_once_and_the_error_is_told(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def down(*given: Any) -> bool:
        asked.append(given[3])
        raise StorageUnavailable("down")

    work.upload(work.corpus(), {"a.zip": zipped_texts(m="one", n="two")})
    monkeypatch.setattr(files, "delete_file", down)
    fails_at_the_end(work, monkeypatch)
    assert len(asked) == 1
    assert work.count(JobFile, JobFile.error_code == "invalid_file") == 1


def test_a_run_that_has_lost_its_lease_leaves_the_files_to_the_one_that_holds_it(work: Work) -> None:
    corpus = work.corpus()
    work.upload(corpus, {"a.zip": zipped_texts(m="one", n="two")})
    late = begun(work)
    with work.catalogue.write() as session:
        session.query(JobFile).update({"lease_expires": 0.0})
        reap(session)
    now = begun(work)
    late.finish()
    now.finish()
    work.worker().drain()
    assert work.chunks(corpus) == ["one", "two"]
    assert work.count(JobFile, JobFile.status == "done") == 3
