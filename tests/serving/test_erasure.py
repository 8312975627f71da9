"""Nothing of a refused upload stays, and no access list keeps a document from being erased."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest
from api_kit import SECRET, Site
from sqlalchemy import update

from serving.auth import NewKey, Principal, create_key
from storage.catalogue.schema import Corpus, Document, DocumentVersion, File, Tenant

TEXT = "The salary of the director is nine hundred thousand."


def made(site: Site, *principals: str, scopes: tuple[str, ...] = ("read", "write"), **more: Any) -> str:
    with site.http() as http:
        body = {"name": "k", "scopes": scopes, "principals": principals, **more}
        return str(http.post("/v1/api_keys", json=body).json()["key"])


def closed(site: Site) -> tuple[str, str]:
    """A vector store with a document that only its adder may see; its file."""
    corpus = site.corpus_of("hr", {"open.txt": "Anybody may read this."})
    with site.http(made(site)) as http:
        file = http.post("/v1/files", files={"file": ("pay.txt", TEXT.encode())}).json()["id"]
        http.post(f"/v1/vector_stores/{corpus}/files", json={"file_id": file, "access": []}).raise_for_status()
    site.ingest()
    return corpus, file


@pytest.mark.parametrize("trouble", ["path is closed", "path twice", "path with a NUL", "broken archive", "quota"])
def test_nothing_of_a_refused_upload_stays(site: Site, trouble: str) -> None:
    corpus, _ = closed(site)
    sent = [("files", ("fine.txt", b"fine words")), ("files", ("other.txt", b"other words"))]
    paths = ["fine.txt", "other.txt"]
    if trouble == "path is closed":
        paths[1] = "pay.txt"
    elif trouble == "path twice":
        paths[1] = "fine.txt"
    elif trouble == "path with a NUL":
        paths[1] = "a\0b"
    elif trouble == "broken archive":
        sent[1] = ("files", ("broken.zip", b"PK\x03\x04 this is no zip"))
    else:
        with site.parts.catalogue.write() as session:
            session.execute(update(Tenant).values(quota_bytes=len(TEXT) + 40))
    objects, files = sorted(site.parts.objects.list("raw/")), site.work.count(File)
    with site.http(made(site)) as http:
        refused = http.post(f"/v1/corpora/{corpus}/documents", files=sent, data={"paths": paths})
        assert refused.status_code in (400, 403, 413, 422, 429), refused.text
        assert [file["filename"] for file in http.get("/v1/files").json()["data"]] == ["open.txt"]
    assert sorted(site.parts.objects.list("raw/")) == objects
    assert site.work.count(File) == files


def test_repeated_uploads_do_not_add_up(site: Site) -> None:
    corpus = site.corpus_of("c", {})
    with site.http() as http:
        for _ in range(4):
            http.post(f"/v1/corpora/{corpus}/documents", files=[("files", ("a.txt", b"words"))]).raise_for_status()
            site.ingest()
        assert len(http.get("/v1/files").json()["data"]) <= 2
        assert [file["path"] for file in http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]] == ["a.txt"]


def test_an_upload_answers_the_sync_that_waits_for_its_content(site: Site) -> None:
    corpus, other = site.corpus_of("c", {}), site.corpus_of("d", {})
    with site.http() as http:
        entry = {"path": "x.txt", "sha256": hashlib.sha256(b"words").hexdigest()}
        job = http.post(f"/v1/corpora/{corpus}/sync", json={"manifest": [entry]}).json()["job_id"]
        http.post(f"/v1/corpora/{other}/documents", files=[("files", ("a.txt", b"words"))]).raise_for_status()
        site.ingest()
        assert http.get(f"/v1/jobs/{job}").json()["progress"]["files_done"] == 1


@pytest.mark.parametrize("door", ["vector store", "file"])
def test_an_admin_erases_what_is_closed_to_them_without_reading_it(site: Site, door: str) -> None:
    corpus, file = closed(site)
    store = f"/v1/vector_stores/{corpus}"
    with site.http() as http:
        listed = {each["id"]: each for each in http.get(f"{store}/files").json()["data"]}
        assert len(listed) == 2
        assert (listed[file]["path"], listed[file]["attributes"], listed[file]["status"]) == (None, {}, "completed")
        assert [each["id"] for each in http.get(f"{store}/files", params={"after": file, "order": "asc"}).json()["data"]] == []
        for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"{store}/files/{file}/content"):
            assert http.get(path).status_code == 404
        assert TEXT not in http.post(f"{store}/search", json={"query": "salary"}).text
        gone = http.delete(f"{store}/files/{file}" if door == "vector store" else f"/v1/files/{file}")
        assert gone.status_code == 200, gone.text
    assert site.work.chunks() == ["Anybody may read this."]
    assert site.work.count(Document) == 1


@pytest.mark.parametrize("which", ["writer", "other tenant's admin", "admin of another store"])
def test_others_erase_nothing_that_is_closed_to_them(site: Site, which: str) -> None:
    corpus, file = closed(site)
    if which == "writer":
        key = made(site)
    elif which == "admin of another store":
        key = made(site, scopes=("admin",), corpora=[site.corpus_of("mine", {})])
    else:
        with site.parts.catalogue.write() as session:
            session.add(Tenant(id="rival", name="rival", created_at=time.time()))
        rival = Principal("rival", None, frozenset({"admin"}))
        key = str(create_key(site.parts.catalogue, SECRET, rival, NewKey("rival", ("admin",)))["key"])
    with site.http(key) as http:
        assert http.delete(f"/v1/vector_stores/{corpus}/files/{file}").status_code == 404
        assert http.delete(f"/v1/files/{file}").status_code == 404
        assert file not in http.get(f"/v1/vector_stores/{corpus}/files").text
    assert TEXT in site.work.chunks()


def test_an_admin_erases_kept_generations_of_what_is_closed_to_them(site: Site) -> None:
    corpus, file = closed(site)
    with site.parts.catalogue.read() as session:
        held = session.get_one(Corpus, corpus)
    with site.http() as http:
        http.put(f"/v1/corpora/{corpus}/settings", json={"keep_versions": 5}).raise_for_status()
        site.work.ingest(held, {"pay.txt": "It is less now."})
        assert site.work.count(DocumentVersion) == 1
        assert http.delete(f"/v1/vector_stores/{corpus}/files/{file}").status_code == 200
    assert site.work.count(DocumentVersion) == 0
