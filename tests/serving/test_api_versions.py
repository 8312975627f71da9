"""Searches and answers as of a time, over HTTP."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from api_kit import Site

from storage.catalogue.schema import DocumentVersion, VersionChunk

NAME = "policy.txt"


def put(site: Site, corpus: str, text: str) -> float:
    with site.http() as http:
        http.post(f"/v1/corpora/{corpus}/documents", files=[("files", (NAME, text))]).raise_for_status()
    site.ingest()
    time.sleep(0.01)
    return time.time()


@pytest.fixture
def story(site: Site) -> tuple[str, float, float]:
    """A corpus that keeps versions of a document with limit 10, then 20, and a moment of each."""
    corpus = site.corpus_of("rules", {})
    with site.http() as http:
        shown = http.put(f"/v1/corpora/{corpus}/settings", json={"keep_versions": "30d"}).json()
        assert shown["keep_versions"] == "30d"
        assert shown["versions_from"] <= time.time()
    return corpus, put(site, corpus, "the limit is 10"), put(site, corpus, "the limit is 20")


def found(site: Site, corpus: str, **body: Any) -> list[str]:
    with site.http() as http:
        reply = http.post(f"/v1/vector_stores/{corpus}/search", json={"query": "limit", **body})
        assert reply.status_code == 200, reply.text
        return [hit["content"][0]["text"] for hit in reply.json()["data"]]


def test_search_takes_a_time_in_either_form(site: Site, story: tuple[str, float, float]) -> None:
    corpus, ten, twenty = story
    iso = datetime.fromtimestamp(ten, UTC).isoformat()
    assert found(site, corpus, as_of=ten) == found(site, corpus, as_of=iso) == ["the limit is 10"]
    assert found(site, corpus, as_of=iso.removesuffix("+00:00")) == found(site, corpus, as_of=iso.replace("+00:00", "Z"))
    assert found(site, corpus, as_of=twenty) == found(site, corpus) == ["the limit is 20"]


@pytest.mark.parametrize("as_of", ["yesterday", "NaN", [1], "2026-13-01"])
def test_what_is_no_time_is_refused(site: Site, story: tuple[str, float, float], as_of: Any) -> None:
    with site.http() as http:
        reply = http.post(f"/v1/vector_stores/{story[0]}/search", json={"query": "limit", "as_of": as_of})
        assert reply.status_code == 400
        assert "as_of" in reply.text


def test_an_answer_cites_the_file_that_was_current_then(site: Site, story: tuple[str, float, float]) -> None:
    with site.http() as http:
        body = {"model": "echo-1@rules", "messages": [{"role": "user", "content": "limit?"}], "preread": {"as_of": story[1]}}
        [citation] = http.post("/v1/chat/completions", json=body).json()["citations"]
        text = http.get(f"/v1/files/{citation['file_id']}/content").text
        assert text == "the limit is 10"
        assert text[citation["start"] : citation["end"]] == citation["quote"]
        early = {**body, "preread": {"as_of": 5}}
        reply = http.post("/v1/chat/completions", json=early)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "version_not_kept")


@pytest.mark.parametrize("how", ["the old file", "its place in the store", "the document", "the corpus"])
def test_a_delete_reaches_what_is_kept_at_once_and_says_so(site: Site, story: tuple[str, float, float], how: str) -> None:
    corpus, ten, twenty = story
    with site.http() as http:
        files = {f["sha256"]: f["id"] for f in http.get("/v1/files").json()["data"]}
        [current] = [f["id"] for f in http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]]
        [old] = set(files.values()) - {current}
        reply = {
            "the old file": lambda: http.delete(f"/v1/files/{old}"),
            "its place in the store": lambda: http.delete(f"/v1/vector_stores/{corpus}/files/{old}"),
            "the document": lambda: http.delete(f"/v1/vector_stores/{corpus}/files/{current}"),
            "the corpus": lambda: http.delete(f"/v1/vector_stores/{corpus}"),
        }[how]()
        assert reply.status_code == 200, reply.text
        if how != "the old file":
            assert reply.json()["receipt"]["versions"] == 1
            assert http.get(f"/v1/purges/{reply.json()['job_id']}").json()["receipt"] == reply.json()["receipt"]
    assert site.work.count(DocumentVersion) == site.work.count(VersionChunk) == 0
    if how != "the corpus":
        assert found(site, corpus, as_of=ten) == []
        assert found(site, corpus, as_of=twenty) == ([] if how == "the document" else ["the limit is 20"])


def test_a_restricted_documents_old_file_is_not_shown_to_others(site: Site, story: tuple[str, float, float]) -> None:
    corpus = story[0]
    with site.http() as http:
        everything = {f["id"] for f in http.get("/v1/files").json()["data"]}
    stranger = site.key("read", "write", corpora=[site.corpus_of("other", {})])
    with site.http(stranger) as http:
        assert http.get("/v1/files").json()["data"] == []
        assert {http.get(f"/v1/files/{file}/content").status_code for file in everything} == {404}
        assert http.post(f"/v1/vector_stores/{corpus}/search", json={"query": "limit", "as_of": story[1]}).status_code == 404
