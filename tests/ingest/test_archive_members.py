"""The stored files of an archive's members: none is lost, none is left over."""

from __future__ import annotations

import io
import zipfile
from typing import Any

from fixtures_work import Work

from ingest.files import SOURCE_PURPOSE, drop_source_files, store_file
from ingest.leases import claim_file
from storage.catalogue.schema import JobFile


def zipped(**files: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"{name}.txt", text)
    return data.getvalue()


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
    work.upload(corpus, {"a.zip": zipped(m="one", n="two")})
    run = begun(work)
    drop_source_files(work.catalogue, work.objects, "t1", [old.id])  # as another commit's end does
    run.finish()
    assert work.count(JobFile) == 1
    due_now(work)
    work.worker().drain()
    assert work.chunks(corpus) == ["one", "two"]
    assert work.count(JobFile, JobFile.status == "done") == 3
