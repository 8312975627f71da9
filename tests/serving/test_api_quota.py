"""A full tenant is told so in OpenAI's own words; what it has stays of use."""

from __future__ import annotations

import openai
import pytest
from api_kit import Site
from sqlalchemy import update

from storage.catalogue.schema import Tenant


def limit(site: Site, quota: int | None) -> None:
    with site.parts.catalogue.write() as session:
        session.execute(update(Tenant).values(quota_bytes=quota))


def test_an_upload_over_quota_is_refused_once_and_the_rest_goes_on(site: Site) -> None:
    corpus = site.corpus_of("c", {"a.txt": "words about harbours"})
    limit(site, 30)
    client = site.client()
    with pytest.raises(openai.RateLimitError) as caught:
        client.files.create(file=("b.txt", b"x" * 100), purpose="assistants")
    assert caught.value.code == "insufficient_quota"
    assert caught.value.type == "insufficient_quota"
    assert "quota" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"
    with site.http() as http:
        refused = http.post(f"/v1/corpora/{corpus}/documents", files=[("files", ("c.txt", b"y" * 100))])
        assert refused.status_code == 429
        metrics = http.get("/metrics").text
    once = 'preread_http_requests_total{method="POST",route="/v1/files",status="429"} 1.0'
    assert once in metrics, "the client has not tried again"
    [hit] = client.vector_stores.search(corpus, query="harbours").data
    assert hit.filename == "a.txt"
    limit(site, 10_000)
    assert client.files.create(file=("b.txt", b"x" * 100), purpose="assistants").bytes == 100
