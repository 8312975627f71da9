"""A tenant's quota: uploads stop with a clear word, documents stay searchable, and room that is made is used."""

from __future__ import annotations

import pytest
from fixtures_work import Work, paragraphs
from sqlalchemy import select, update

from ingest.files import store_file
from ingest.planner import SourcePlanner
from ingest.sources import Reach
from ingest.worker import IngestWorker
from precompute import rows
from storage.catalogue.schema import KVObject, Tenant
from storage.errors import QuotaExceeded
from storage.quota import usage


def limit(work: Work, quota: int | None, tenant: str = "t1") -> None:
    with work.catalogue.write() as session:
        session.execute(update(Tenant).where(Tenant.id == tenant).values(quota_bytes=quota))


def used(work: Work, tenant: str = "t1"):
    with work.catalogue.read() as session:
        return usage(session, tenant)


def claim(work: Work):
    with work.catalogue.write() as session:
        return rows.claim(session, "w", 60, 10_000, None)


def statuses(work: Work) -> set[str]:
    with work.catalogue.read() as session:
        return set(session.scalars(select(KVObject.status)))


def test_usage_counts_kv_and_each_content_once_and_only_the_tenants_own(work):
    corpus = work.corpus()
    text = paragraphs(2)
    work.ingest(corpus, {"a.txt": text, "b.txt": text})
    work.ingest(work.corpus("x", tenant="t2"), {"a.txt": paragraphs(5, tag="q")})
    work.compute_kv()
    assert (used(work).kv, used(work).raw) == (20, len(text))
    assert used(work).limit is None
    work.deleter.document("t1", work.document(corpus, "a.txt").id)
    work.deleter.document("t1", work.document(corpus, "b.txt").id)
    assert used(work).total == 0


def test_an_upload_that_does_not_fit_is_refused_and_leaves_nothing(work):
    work.corpus()
    work.corpus(tenant="t2")
    limit(work, 100)
    store_file(work.catalogue, work.objects, "t1", "a", b"x" * 60)
    with pytest.raises(QuotaExceeded, match="60 of the 100 bytes") as caught:
        store_file(work.catalogue, work.objects, "t1", "b", b"y" * 41)
    assert caught.value.code == "insufficient_quota"
    assert used(work).raw == 60
    assert len(list(work.objects.list("raw/"))) == 1
    store_file(work.catalogue, work.objects, "t1", "c", b"y" * 40)
    store_file(work.catalogue, work.objects, "t1", "again", b"x" * 60)  # is there already
    store_file(work.catalogue, work.objects, "t2", "b", b"y" * 41)  # another tenant's quota is its own


def test_kv_of_a_full_tenant_is_set_aside_with_the_reason_and_the_others_go_on(work):
    corpus = work.corpus()
    job_id = work.ingest(corpus, {"a.txt": paragraphs(3)})
    work.ingest(work.corpus("o", tenant="t2"), {"a.txt": paragraphs(2, tag="q")})
    limit(work, 1)
    batch = claim(work)
    assert batch.tenant_id == "t2"
    assert claim(work) is None
    assert work.count(KVObject, KVObject.status == "over_quota") == 3
    work.compute_kv()
    view = work.view(job_id)
    assert view["status"] == "completed_with_errors"
    [error] = view["errors"]
    assert error["code"] == "insufficient_quota"
    assert "quota" in error["message"]
    dense, lexical = work.search(corpus, "p1w1")
    assert dense
    assert lexical, "documents stay searchable"


@pytest.mark.parametrize("quota", [None, 10**9])
def test_room_that_is_made_is_used(work, quota):
    work.ingest(work.corpus(), {"a.txt": paragraphs(3)})
    limit(work, 1)
    assert claim(work) is None
    with work.catalogue.write() as session:
        rows.reap(session)
    assert statuses(work) == {"over_quota"}, "still full"
    limit(work, quota)
    with work.catalogue.write() as session:
        rows.reap(session)
    assert statuses(work) == {"pending"}
    assert len(claim(work).rows) == 3


def test_deleting_a_document_makes_room(work):
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(3)})
    work.compute_kv()
    limit(work, used(work).total + 1000)
    work.ingest(corpus, {"b.txt": paragraphs(2, tag="q")})
    limit(work, used(work).total)
    assert claim(work) is None
    work.deleter.document("t1", work.document(corpus, "a.txt").id)
    with work.catalogue.write() as session:
        rows.reap(session)
    assert len(claim(work).rows) == 2


def test_a_sync_names_the_files_that_do_not_fit(work, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text(paragraphs(1))
    (folder / "b.txt").write_text(paragraphs(40))
    corpus = work.corpus(source={"type": "folder", "path": str(folder)})
    limit(work, 500)
    from ingest.jobs import create_job

    with work.catalogue.write() as session:
        job_id = create_job(
            session, tenant_id="t1", corpus_id=corpus.id, type="sync", request={}, planned=False
        ).id
    planner = SourcePlanner(work.catalogue, work.objects, Reach([str(tmp_path)]), work.pipeline.done_hash)
    IngestWorker(work.catalogue, work.pipeline, planner, "w1", work.rung.append, 5.0).drain()
    work.compute_kv()
    view = work.view(job_id)
    assert [(e["filename"], e["code"]) for e in view["errors"]] == [("b.txt", "insufficient_quota")]
    assert work.document(corpus, "a.txt").status == "completed"
