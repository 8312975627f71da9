"""What one may not see, one may neither open nor replace nor learn of."""

from __future__ import annotations

from typing import Any

from api_kit import Site
from sqlalchemy import select

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
