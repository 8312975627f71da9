"""An upload of more documents than one transaction makes is answered as any other."""

from __future__ import annotations

import pytest
from api_kit import Site

from ingest import attaching
from serving.doors import batches
from storage.catalogue.schema import Document, File, Job, JobFile

FILES = [("files", (f"{number}.txt", f"text number {number}".encode())) for number in range(8)]


@pytest.fixture(autouse=True)
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents a transaction."""
    monkeypatch.setattr(attaching, "BATCH", 3)
    monkeypatch.setattr(batches, "BATCH", 3)


def test_an_upload_of_many_files_is_one_job_over_all_of_them(site: Site) -> None:
    corpus = site.corpus_of("empty", {})
    with site.http() as http:
        made = http.post(f"/v1/corpora/{corpus}/documents", files=FILES).raise_for_status().json()
        assert (made["type"], made["progress"]["files_total"]) == ("ingest", 8)
        site.ingest()
        job = http.get(f"/v1/jobs/{made['id']}").json()
        listed = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
        assert len(http.get("/v1/files").json()["data"]) == 8
    assert job["status"] == "completed"
    assert sorted(file["path"] for file in listed) == [f"{number}.txt" for number in range(8)]
    assert {file["status"] for file in listed} == {"completed"}


def test_a_closed_path_among_many_refuses_them_all_and_leaves_nothing(site: Site) -> None:
    corpus = site.corpus_of("closed", {"7.txt": "mine"})
    with site.parts.catalogue.write() as session:
        session.query(Document).one().access = ["somebody else"]
    before = [site.work.count(table) for table in (Document, File, Job, JobFile)]
    with site.http() as http:
        refused = http.post(f"/v1/corpora/{corpus}/documents", files=FILES)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "path_closed")
    assert [site.work.count(table) for table in (Document, File, Job, JobFile)] == before
