"""What an operator says of a corpus holds for all that is in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_kit import Site
from sqlalchemy import select

from storage.catalogue.schema import ChunkRow


def keys(site: Site) -> list[str | None]:
    with site.parts.catalogue.read() as session:
        return list(session.scalars(select(ChunkRow.kv_key).order_by(ChunkRow.ordinal)))


def test_another_conditioning_brings_the_documents_along(site: Site) -> None:
    text = "\n\n".join(" ".join(f"p{n}w{word}" for word in range(12)) for n in range(3))
    corpus = site.corpus_of("handbook", {"a.txt": text})
    before = keys(site)
    assert len(before) == 3
    with site.http() as http:
        url = f"/v1/corpora/{corpus}/settings"
        assert http.get(url).json()["conditioning"] == "none"
        changed = http.put(url, json={"conditioning": "document"}).json()
        assert (changed["conditioning"], changed["emphasis"]) == ("document", {})
        [job] = [job for job in http.get("/v1/jobs").json()["data"] if job["type"] == "precompute"]
        site.work.worker().drain()
        assert http.get(f"/v1/jobs/{job['id']}").json()["progress"]["chunks_total"] == 3
        after = keys(site)
        assert after[0] == before[0], "nothing stands before the first chunk"
        assert set(after[1:]).isdisjoint(before)
        http.put(url, json={"conditioning": "document"}).raise_for_status()
        http.put(url, json={"emphasis": {"*": 2.0}}).raise_for_status()
        assert http.get(url).json()["conditioning"] == "document", "what is left out stays"
        assert len([job for job in http.get("/v1/jobs").json()["data"] if job["type"] == "precompute"]) == 1


@pytest.mark.parametrize(
    "body",
    [{"conditioning": "twice"}, {"emphasize": {"*": 2}}, {"emphasis": {"\ud800": 2}}, {"emphasis": {"*": 0}}, {"emphasis": 3},
     {"keep_versions": "soon"}, {"keep_versions": -1}, {"keep_versions": 1e9}],
)
def test_nonsense_is_refused_and_changes_nothing(body: Any, site: Site) -> None:
    corpus = site.corpus_of("handbook", {"a.txt": "Invoices are due after thirty days."})
    with site.http() as http:
        url = f"/v1/corpora/{corpus}/settings"
        reply = http.put(url, content=json.dumps(body), headers={"content-type": "application/json"})
        assert reply.status_code in (400, 422), reply.text
        assert reply.json()["error"]["message"]
        unchanged = {"emphasis": {}, "conditioning": "none", "keep_versions": 0, "versions_from": None}
        unchanged |= {"access": [], "sharing": {"group": None}}
        assert http.get(url).json() == {"object": "corpus.settings", "corpus_id": corpus, **unchanged}
