"""What one may not see, one may neither open nor replace nor learn of."""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import Any

import pytest
from api_kit import Site
from sqlalchemy import select

from ingest.planner import SourcePlanner
from serving.auth import Principal
from storage.catalogue.schema import Document

SECRET_TEXT = "The salary of the director is nine hundred thousand."
EVERYONE = "group:everyone"


def made(site: Site, *principals: str, scopes: tuple[str, ...] = ("read", "write")) -> dict[str, Any]:
    """A new key with these names."""
    with site.http() as http:
        answer = http.post("/v1/api_keys", json={"name": "k", "scopes": scopes, "principals": principals})
        answer.raise_for_status()
        return dict(answer.json())


def added(site: Site, key: str, corpus: str, name: str, text: str, **body: Any) -> int:
    """The status of putting a file into a vector store."""
    with site.http(key) as http:
        file = http.post("/v1/files", files={"file": (name, text.encode())}).json()["id"]
        return http.post(f"/v1/vector_stores/{corpus}/files", json={"file_id": file, **body}).status_code


def found(site: Site, key: str, corpus: str) -> list[str]:
    with site.http(key) as http:
        hits = http.post(f"/v1/vector_stores/{corpus}/search", json={"query": "salary of the director"}).json()["data"]
    return [hit["content"][0]["text"] for hit in hits]


def test_whoever_adds_a_closed_document_does_not_open_it_to_their_groups(site: Site) -> None:
    corpus = site.corpus_of("hr", {})
    ann, bob, carol = made(site, "user:ann", EVERYONE), made(site, "user:bob", EVERYONE), made(site, "user:carol")
    assert added(site, ann["key"], corpus, "pay.txt", SECRET_TEXT, access=["user:carol"]) == 200
    site.ingest()
    with site.parts.catalogue.read() as session:
        assert session.scalars(select(Document.access)).one() == sorted([ann["id"], "user:carol"])
    assert found(site, ann["key"], corpus) == found(site, carol["key"], corpus) == [SECRET_TEXT]
    assert found(site, bob["key"], corpus) == []


def test_a_person_is_known_by_their_name_through_every_login() -> None:
    names = frozenset({"user:ann", "group:staff"})
    login = Principal("t", "key-1", frozenset({"write"}), user_id="ann", principals=names)
    assert login.own_names == {"user:ann"}
    assert Principal("t", "key-2", frozenset({"write"}), principals=names).own_names == {"key-2"}


def closed_store(site: Site) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A vector store with Ann's closed pay.txt, Ann's key, and that of Eve, who may write to the store."""
    corpus, ann, eve = site.corpus_of("hr", {"open.txt": "Anybody may read this."}), made(site), made(site)
    assert added(site, ann["key"], corpus, "pay.txt", SECRET_TEXT, access=[]) == 200
    site.ingest()
    assert SECRET_TEXT in found(site, ann["key"], corpus)
    assert SECRET_TEXT not in found(site, eve["key"], corpus)
    return corpus, ann, eve


def sha_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("door", ["file", "open to all", "batch", "documents", "manifest", "known manifest", "dry run"])
def test_nobody_opens_or_replaces_what_they_may_not_see(site: Site, door: str) -> None:
    corpus, ann, eve = closed_store(site)
    with site.http(eve["key"]) as http:
        file = http.post("/v1/files", files={"file": ("pay.txt", b"mine now")}).json()["id"]
        store, entry = f"/v1/vector_stores/{corpus}", {"path": "pay.txt", "sha256": sha_of("else")}
        known = {**entry, "sha256": sha_of(SECRET_TEXT)}
        refused = {
            "file": lambda: http.post(f"{store}/files", json={"file_id": file, "access": [eve["id"]]}),
            "open to all": lambda: http.post(f"{store}/files", json={"file_id": file}),
            "batch": lambda: http.post(f"{store}/file_batches", json={"file_ids": [file]}),
            "documents": lambda: http.post(f"/v1/corpora/{corpus}/documents", files=[("files", ("pay.txt", b"mine"))]),
            "manifest": lambda: http.post(f"/v1/corpora/{corpus}/sync", json={"manifest": [entry]}),
            "known manifest": lambda: http.post(f"/v1/corpora/{corpus}/sync", json={"manifest": [known]}),
            "dry run": lambda: http.post(f"/v1/corpora/{corpus}/sync", json={"manifest": [known], "dry_run": True}),
        }[door]()
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "path_closed")
    assert SECRET_TEXT not in found(site, eve["key"], corpus)
    site.ingest()
    assert SECRET_TEXT not in found(site, eve["key"], corpus)
    assert SECRET_TEXT in found(site, ann["key"], corpus)


def test_whoever_may_see_a_document_replaces_it_and_its_list(site: Site) -> None:
    corpus, ann, eve = closed_store(site)
    assert added(site, ann["key"], corpus, "pay.txt", "The salary is less now.", access=[eve["id"]]) == 200
    site.ingest()
    assert "The salary is less now." in found(site, eve["key"], corpus)
    assert added(site, eve["key"], corpus, "pay.txt", "The salary is more now.") == 200


def test_a_sync_leaves_alone_what_its_asker_may_not_see(site: Site) -> None:
    corpus, ann, eve = closed_store(site)
    manifest = [{"path": "copy.txt", "sha256": sha_of(SECRET_TEXT)}]
    with site.http(eve["key"]) as http:
        done = http.post(f"/v1/corpora/{corpus}/sync", json={"manifest": manifest, "delete_missing": True}).json()
    assert (done["added"], done["renamed"], done["deleted"]) == (["copy.txt"], [], ["open.txt"])
    site.ingest()
    assert found(site, ann["key"], corpus) == [SECRET_TEXT], "nothing was made of a content by its hash alone"
    assert found(site, eve["key"], corpus) == []


def test_a_document_that_was_closed_while_a_sync_waited_stays_as_it_is(site: Site) -> None:
    corpus, ann, eve = site.corpus_of("hr", {}), made(site), made(site)
    with site.http(eve["key"]) as http:
        entry = {"path": "pay.txt", "sha256": sha_of("mine")}
        job = http.post(f"/v1/corpora/{corpus}/sync", json={"manifest": [entry]}).json()["job_id"]
        assert added(site, ann["key"], corpus, "pay.txt", SECRET_TEXT, access=[]) == 200
        http.post("/v1/files", files={"file": ("pay.txt", b"mine")}).raise_for_status()
        site.ingest()
        assert http.get(f"/v1/jobs/{job}").json()["status"] == "failed"
    assert found(site, ann["key"], corpus) == [SECRET_TEXT]


def test_an_archive_takes_no_path_in_it_that_is_closed_to_its_asker(site: Site) -> None:
    corpus, ann, eve = site.corpus_of("hr", {}), made(site), made(site)
    for name in ("z.zip!/pay.txt", "z.zip!/gone.txt"):
        assert added(site, ann["key"], corpus, name, f"{SECRET_TEXT} {name}", access=[]) == 200
    site.ingest()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("pay.txt", "mine now")
        archive.writestr("new.txt", "The salary of all.")
    with site.http(eve["key"]) as http:
        file = http.post("/v1/files", files={"file": ("z.zip", packed.getvalue())}).json()["id"]
        http.post(f"/v1/vector_stores/{corpus}/files", json={"file_id": file, "access": []}).raise_for_status()
    site.ingest()
    assert found(site, eve["key"], corpus) == ["The salary of all."]
    assert sorted(found(site, ann["key"], corpus)) == sorted(f"{SECRET_TEXT} z.zip!/{n}" for n in ("pay.txt", "gone.txt"))


def test_a_job_is_retried_by_those_only_who_may_see_its_documents(site: Site) -> None:
    corpus, ann, eve = closed_store(site)
    with site.http(eve["key"]) as theirs, site.http(ann["key"]) as own:
        job = own.get("/v1/jobs", params={"corpus_id": corpus}).json()["data"][0]["id"]
        refused = theirs.post(f"/v1/jobs/{job}/retry", json={"only": "all"})
        assert (refused.status_code, "pay.txt" in refused.text) == (403, False)
        assert own.post(f"/v1/jobs/{job}/retry", json={"only": "all"}).status_code == 200


def test_a_job_names_no_document_that_is_closed_to_who_looks(site: Site) -> None:
    corpus, ann, eve = site.corpus_of("hr", {}), made(site), made(site, scopes=("read",))
    with site.http(ann["key"]) as http:
        named = [{"file": (name, b"ERROR invalid_file")} for name in ("fired.txt", "open.txt")]
        sent = [http.post("/v1/files", files=each).json()["id"] for each in named]
        body = {"files": [{"file_id": sent[0], "access": []}, {"file_id": sent[1]}]}
        job = http.post(f"/v1/vector_stores/{corpus}/file_batches", json=body).json()["id"]
    site.ingest()
    for key, names in ((ann, ["fired.txt", "open.txt"]), (eve, [None, "open.txt"])):
        with site.http(key["key"]) as http:
            for path in (f"/v1/jobs/{job}", "/v1/jobs", f"/v1/jobs/{job}/events"):
                seen = http.get(path)
                assert seen.status_code == 200
                assert ("fired" in seen.text, sent[0] in seen.text) == (key is ann, key is ann), path
            shown = http.get(f"/v1/jobs/{job}").json()
            assert [error["filename"] for error in shown["errors"]] == names
            assert [error["code"] for error in shown["errors"]] == ["invalid_file"] * 2
            assert shown["progress"]["files_failed"] == 2


def test_a_sync_names_no_path_that_is_closed_to_who_looks(site: Site) -> None:
    corpus, folder = site.corpus_of("hr", {}), site.parts.settings.data_dir / "sources" / "hr"
    folder.mkdir(parents=True)
    for name in ("fired.txt", "open.txt"):
        (folder / name).write_text("words")
    boss, eve = made(site, "group:hr"), made(site)
    with site.http() as http:
        rules = [{"path": "fired*", "principals": ["group:hr"]}]
        http.put(f"/v1/corpora/{corpus}/settings", json={"access": rules}).raise_for_status()
        http.put(f"/v1/corpora/{corpus}/sources", json={"source": {"type": "folder", "path": str(folder)}}).raise_for_status()
    for key, names in ((boss, ["fired.txt", "open.txt"]), (eve, ["open.txt"])):
        with site.http(key["key"]) as http:
            job = http.post(f"/v1/corpora/{corpus}/sync", json={"dry_run": True}).json()["id"]
            planner = SourcePlanner(site.parts.catalogue, site.parts.objects, site.parts.reach, site.parts.done_hash)
            site.work.worker(planner=planner).drain()
            assert sorted(http.get(f"/v1/corpora/{corpus}/syncs/{job}").json()["found"]["added"]) == names
