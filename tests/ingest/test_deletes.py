"""Deletion reaches every kind of thing, and the receipt counts each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from fixtures_work import Work, paragraphs
from sqlalchemy import select, update

from ingest.deletes import Deleter, record_purge
from ingest.files import delete_file, read_file, store_file
from ingest.leases import claim_file
from ingest.purge import sweep
from storage.catalogue.schema import ChunkRow, Corpus, Document, File, Job, JobFile, KVObject
from storage.errors import NotFound, ObjectMissing, StorageUnavailable


def test_a_deleted_document_is_gone_everywhere_and_counted(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(3), "b.txt": paragraphs(1) + "\n\n" + paragraphs(1, tag="q")})
    work.compute_kv()
    document = work.document(corpus, "a.txt")
    assert document is not None
    receipt = work.deleter.document("t1", document.id)
    assert receipt == {
        "documents": 1, "chunks": 3, "vectors": 3, "lexical": 3, "kv_objects": 2, "kv_kept": 1, "kv_owed": 0,
        "versions": 0, "files": 1, "files_kept": 0,
    }  # fmt: skip
    dense, lexical = work.search(corpus, "p0w1 p1w1 p2w1")
    assert "p1w1" not in " ".join(dense + lexical)
    assert work.count(ChunkRow, ChunkRow.document_id == document.id) == 0
    assert len(work.deleted) == 2
    assert work.count(KVObject) == 2
    assert len(list(work.objects.list("raw/"))) == 1
    with pytest.raises(NotFound):
        work.deleter.document("t1", document.id)


def test_another_tenants_document_looks_like_none(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "text"})
    document = work.document(corpus, "a.txt")
    assert document is not None
    with pytest.raises(NotFound):
        work.deleter.document("t2", document.id)
    with pytest.raises(NotFound):
        work.deleter.corpus("t2", corpus.id)
    assert work.chunks(corpus) == ["text"]


def test_the_raw_file_stays_while_another_document_needs_it(work: Work) -> None:
    one, two = work.corpus("one"), work.corpus("two")
    work.ingest(one, {"a.txt": "same bytes"})
    work.ingest(two, {"a.txt": "same bytes"})
    document = work.document(one, "a.txt")
    assert document is not None
    receipt = work.deleter.document("t1", document.id)
    assert (receipt["files"], receipt["files_kept"]) == (0, 1)
    assert (receipt["kv_objects"], receipt["kv_kept"]) == (0, 1)
    assert len(list(work.objects.list("raw/"))) == 1


def test_a_corpus_goes_with_all_its_documents_and_its_jobs_end(work: Work) -> None:
    corpus, other = work.corpus(), work.corpus("other")
    work.ingest(corpus, {f"{i}.txt": f"text {i}" for i in range(5)})
    work.ingest(other, {"keep.txt": "kept"})
    waiting = work.upload(corpus, {"later.txt": "later"})
    receipt = work.deleter.corpus("t1", corpus.id, raw=True)
    assert (receipt["documents"], receipt["chunks"], receipt["files"]) == (6, 5, 6)
    assert work.view(waiting)["status"] == "cancelled"
    assert work.count(Corpus) == 1
    assert work.chunks() == ["kept"]


def test_what_is_added_while_a_corpus_is_deleted_goes_with_it(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "text"})
    kept, late = Deleter.kept, []

    def and_add(*args: Any, **options: Any) -> dict[str, int]:
        if not late:
            late.append(work.upload(corpus, {"late.txt": "text"}))
        return kept(*args, **options)

    monkeypatch.setattr(Deleter, "kept", and_add)
    assert work.deleter.corpus("t1", corpus.id)["documents"] == 2
    assert (work.count(Corpus), work.count(Document)) == (0, 0)
    assert work.view(late[0])["status"] == "cancelled"


def test_work_on_a_deleted_document_commits_nothing(work: Work) -> None:
    corpus = work.corpus()
    job = work.upload(corpus, {"a.txt": "text"})
    lease = claim_file(work.catalogue, "w", 5)
    document = work.document(corpus, "a.txt")
    assert lease is not None
    assert document is not None
    work.parser.accident = lambda name: work.deleter.document("t1", document.id) and None
    work.pipeline.process(lease)
    assert work.count(ChunkRow) == 0
    assert work.count(JobFile, JobFile.status == "cancelled") == 1
    assert work.view(job)["status"] == "failed"


def test_a_store_that_is_down_owes_the_deletion_and_the_next_sweep_does_it(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(2)})
    document = work.document(corpus, "a.txt")
    assert document is not None

    def down(keys: Sequence[str]) -> None:
        raise StorageUnavailable("down")

    work.delete_kv, kept = down, work.delete_kv  # type: ignore[method-assign]
    assert work.deleter.document("t1", document.id)["kv_owed"] == 2
    assert work.count(KVObject, KVObject.status == "purge") == 2
    assert sweep(work.catalogue, kept) == 2
    assert len(work.deleted) == 2
    assert work.count(KVObject) == 0


def test_what_the_store_will_not_delete_stays_owed_and_holds_up_no_other(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingest.purge.BATCH", 2)
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(7)})
    document = work.document(corpus, "a.txt")
    assert document is not None
    with work.catalogue.read() as session:
        keys = sorted(session.scalars(select(KVObject.key)))
    refused, asked = {keys[0], keys[3]}, list[str]()

    def refusing(batch: Sequence[str]) -> Collection[str]:
        asked.extend(batch)
        return refused.intersection(batch)

    work.delete_kv, kept = refusing, work.delete_kv  # type: ignore[method-assign]
    assert work.deleter.document("t1", document.id)["kv_owed"] == 2
    assert asked == keys, "each once"
    with work.catalogue.read() as session:
        assert dict(session.execute(select(KVObject.key, KVObject.status)).all()) == dict.fromkeys(refused, "purge")
    with pytest.raises(StorageUnavailable, match="2 objects"):
        sweep(work.catalogue, refusing)
    assert sweep(work.catalogue, kept) == 2
    assert work.count(KVObject) == 0


def test_a_chunk_that_comes_back_before_the_sweep_takes_its_row_back(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "text"})
    work.compute_kv()
    with work.catalogue.write() as session:
        session.execute(update(KVObject).values(status="purge"))
    work.ingest(corpus, {"b.txt": "text"})
    assert work.deleted == []
    assert work.compute_kv() == 1


def test_the_receipt_is_kept_with_a_job(work: Work) -> None:
    corpus = work.corpus()
    with work.catalogue.write() as session:
        job = record_purge(session, "t1", corpus.id, {"documents": 1}, {"document_id": "doc-1"}, 0).id
    assert work.view(job)["status"] == "completed"
    with work.catalogue.read() as session:
        assert session.get_one(Job, job).result["receipt"] == {"documents": 1}


def test_an_uploaded_file_is_read_back_and_stored_once(work: Work) -> None:
    work.corpus()
    first = store_file(work.catalogue, work.objects, "t1", "ü /名.txt", b"bytes")
    again = store_file(work.catalogue, work.objects, "t1", "ü /名.txt", b"bytes")
    twin = store_file(work.catalogue, work.objects, "t1", "other.txt", b"bytes")
    assert (first.id, first.filename) == (again.id, "ü /名.txt")
    assert twin.id != first.id
    assert len(list(work.objects.list("raw/"))) == 1
    assert read_file(work.objects, first) == b"bytes"
    assert delete_file(work.catalogue, work.objects, "t1", first.id)
    assert read_file(work.objects, twin) == b"bytes"
    with pytest.raises(NotFound):
        delete_file(work.catalogue, work.objects, "t2", twin.id)
    assert delete_file(work.catalogue, work.objects, "t1", twin.id)
    assert list(work.objects.list("raw/")) == []


def test_a_damaged_upload_is_not_read(work: Work) -> None:
    work.corpus()
    file = store_file(work.catalogue, work.objects, "t1", "a.txt", b"bytes")
    [name] = work.objects.list("raw/")
    work.objects.put(name, [b"bytez"])
    with pytest.raises(ObjectMissing):
        read_file(work.objects, file)
    work.objects.put(name, [b"byt"])
    again = store_file(work.catalogue, work.objects, "t1", "a.txt", b"bytes")
    assert read_file(work.objects, again) == b"bytes", "uploading it again repairs it"


def test_a_file_that_a_job_waits_for_is_kept(work: Work) -> None:
    corpus = work.corpus()
    work.upload(corpus, {"a.txt": "text"})
    with work.catalogue.write() as session:
        session.execute(update(Document).values(file_id="file-other"))
    with work.catalogue.read() as session:
        [file] = session.query(File).all()
    assert not delete_file(work.catalogue, work.objects, "t1", file.id)
