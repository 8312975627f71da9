from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from api_kit import SECRET, EchoEngine, Site, make_parts, running
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from serving.api.app import build_app
from serving.api.middleware import JSON_LIMIT, BodyLimit
from serving.auth import ensure_admin_key, key_mac
from storage.catalogue.schema import ApiKey
from storage.errors import StorageUnavailable
from storage.types import Anchor, Block, ParsedDocument

OPENAI_KEYS = {"message", "type", "param", "code"}


def refusal(reply: httpx.Response) -> tuple[int, str | None]:
    """Status and code of an answer in OpenAI's error shape."""
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == OPENAI_KEYS
    assert reply.headers["x-request-id"]
    return reply.status_code, body["error"]["code"]


def test_every_refusal_has_openai_s_shape(site: Site) -> None:
    json_type = {"content-type": "application/json"}
    with site.http() as http:
        assert refusal(http.get("/v1/nothing")) == (404, "unknown_url")
        assert refusal(http.get("/nothing")) == (404, "unknown_url")
        assert refusal(http.delete("/v1/chat/completions")) == (405, "method_not_allowed")
        assert refusal(http.post("/v1/chat/completions", content=b"{", headers=json_type)) == (
            400,
            "invalid_json",
        )
        assert refusal(http.post("/v1/chat/completions", json=[1])) == (400, "invalid_request")
        assert refusal(http.post("/v1/chat/completions", content=b"x"))[0] == 400
        assert refusal(http.post("/v1/files", data={"purpose": "assistants"})) == (400, "missing_required_parameter")
        reply = http.post("/v1/chat/completions", json={"model": 5, "messages": [{"role": "user"}]})
        assert reply.json()["error"]["param"] == "model"
        assert refusal(http.get("/v1/files", params={"limit": 0})) == (400, "invalid_value")
        assert refusal(http.get("/v1/vector_stores", params={"limit": 101}))[0] == 400


def test_clients_raise_their_typed_errors(site: Site) -> None:
    with pytest.raises(openai.NotFoundError):
        site.client().vector_stores.retrieve("vs_none")
    with pytest.raises(openai.AuthenticationError):
        site.client("pr_wrong").models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        site.client().vector_stores.create(name="x", expires_after={"anchor": "last_active_at", "days": 1})
    assert caught.value.param == "expires_after"
    with pytest.raises(openai.PermissionDeniedError):
        site.client(site.key("read")).vector_stores.create(name="x")


@pytest.mark.parametrize("claimed", [True, False])
def test_bodies_are_bounded_by_what_is_read(site: Site, claimed: bool) -> None:
    big = b"x" * (9 << 20)
    json_type = {"content-type": "application/json"}
    multipart = {"content-type": "multipart/form-data; boundary=b"}
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    with site.http() as http:
        for path, headers, body in (
            ("/v1/chat/completions", json_type, big),
            ("/v1/files", multipart, head + big),
            (f"/site/site-x/sync?expires=1&signature={0:064x}", multipart, head + big),
        ):
            content = body if claimed else iter([body[i : i + 65536] for i in range(0, len(body), 65536)])
            assert refusal(http.post(path, content=content, headers=headers)) == (413, "request_too_large")
        assert http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    ("path", "has_room"),
    [
        ("/v1/files", True),
        ("/v1/uploads/upload_1/parts", True),
        ("/v1/corpora/vs_1/documents", True),
        ("/v1/chat/completions", False),
        ("/v1/vector_stores/vs_1/files", False),
        ("/v1/files/file-1", False),
        ("/v1/filesystem", False),
        ("/x/v1/files", False),
        ("/site/site-x/sync", False),
    ],
)
def test_only_where_files_are_sent_a_body_may_be_as_large_as_a_file(path: str, has_room: bool) -> None:
    """Other bodies are read whole into memory, and before anybody asks for a scope."""
    let_in = Starlette()
    let_in.add_route(path, lambda _: PlainTextResponse("in"), methods=["POST"])
    transport = httpx.ASGITransport(BodyLimit(let_in, max_upload_bytes=64 << 20))
    headers = {"content-type": "multipart/form-data; boundary=b"}

    async def ask() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", verify=False) as client:
            return (await client.post(path, content=bytes(JSON_LIMIT + 1), headers=headers)).status_code

    assert asyncio.run(ask()) == (200 if has_room else 413)


def test_a_stranger_s_body_is_not_read(site: Site) -> None:
    read = []

    def endless():
        for i in range(400):
            read.append(i)
            yield b"x" * 65536

    with site.http("") as http:
        reply = http.post(
            "/v1/files", content=endless(), headers={"content-type": "multipart/form-data; boundary=b"}
        )
    assert reply.status_code == 401


def test_request_ids_are_echoed_if_harmless(site: Site) -> None:
    with site.http() as http:
        assert http.get("/healthz", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
        assert (
            http.get("/healthz", headers={"x-request-id": "a b\tc"})
            .headers["x-request-id"]
            .startswith("req-")
        )


def test_keys_are_kept_as_macs_and_first_shown_once(site: Site) -> None:
    assert ensure_admin_key(site.parts.catalogue, SECRET) is None
    assert site.admin_key.startswith("pr_")
    with site.parts.catalogue.read() as session:
        [row] = session.query(ApiKey).all()
    assert row.mac == key_mac(SECRET, site.admin_key) != key_mac(b"another secret", site.admin_key)
    assert site.admin_key not in str(vars(row))
    with site.http() as http:
        made = http.post("/v1/api_keys", json={"name": "n", "scopes": ["read"]}).json()
        listed = http.get("/v1/api_keys")
        trail = http.get("/v1/audit")
        assert made["key"] not in listed.text + trail.text
        http.delete(f"/v1/api_keys/{made['id']}")
        events = http.get("/v1/audit").json()["data"]
    assert [(e["action"], e["target"]) for e in events[:2]] == [
        ("api_key.revoke", made["id"]), ("api_key.create", made["id"])]  # fmt: skip
    assert all(e["key_id"] for e in events[:2])


def test_a_key_cannot_hand_out_more_than_it_holds(site: Site) -> None:
    mine, other = site.corpus_of("mine", {}), site.corpus_of("other", {})
    restricted = site.key("admin", corpora=[mine])
    with site.http(restricted) as http:
        assert http.post("/v1/api_keys", json={"name": "n"}).status_code == 400
        assert http.post("/v1/api_keys", json={"name": "n", "corpora": [other]}).status_code == 404
        assert http.post("/v1/api_keys", json={"name": "n", "corpora": [mine]}).status_code == 200
        assert len(http.get("/v1/api_keys").json()["data"]) == 2
        assert http.get("/v1/audit").status_code == 403


def test_embeddings_agree_in_both_formats(site: Site) -> None:
    client = site.client()
    packed = client.embeddings.create(model="any", input=["one", "two"])
    plain = client.embeddings.create(model="any", input=["one", "two"], encoding_format="float")
    for a, b in zip(packed.data, plain.data, strict=True):
        np.testing.assert_allclose(a.embedding, b.embedding, atol=1e-7)
    assert packed.usage.prompt_tokens == 2
    for wrong in ([[10**6]], [], "", ["x", ""]):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="any", input=wrong)
        assert caught.value.param == "input"


def test_models_name_the_corpora_a_key_may_read(site: Site) -> None:
    site.corpus_of("unique", {})
    twins = [site.corpus_of("twin", {}) for _ in range(2)]
    client = site.client()
    ids = [model.id for model in client.models.list()]
    assert ids == ["echo-1", "echo-1@unique", *[f"echo-1@{id}" for id in twins]]
    for id in ids:
        assert client.models.retrieve(id).model_extra["max_model_len"] == 4096
    for unknown in ("gpt", "echo-1@none", "xecho-1@unique"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(unknown)
    with pytest.raises(openai.BadRequestError):
        client.models.retrieve("echo-1@twin")


def test_metrics_count_answers_jobs_and_requests(site: Site) -> None:
    site.corpus_of("handbook", {"a.txt": "some words of it"})
    with site.http() as http:
        body = {"model": "echo-1@handbook", "messages": [{"role": "user", "content": "words"}]}
        http.post("/v1/chat/completions", json=body).raise_for_status()
    with site.http("") as http:
        text = http.get("/metrics").text
    assert 'preread_prompt_tokens_total{origin="computed"} 10.0' in text
    assert 'preread_jobs{status="completed"} 1.0' in text
    assert "preread_ttft_seconds_count 1.0" in text
    assert 'route="/v1/chat/completions",status="200"' in text
    assert 'preread_kv_tier_hits_total{tier="store"} 0.0' in text
    assert 'preread_kv_tier_capacity_bytes{tier="memory"} 0.0' in text
    assert 'preread_kv_tier_evictions_total{tier="store"}' not in text, "it has no budget"


def test_words_of_strangers_make_no_series(site: Site) -> None:
    with site.http("") as http:
        for method in ("BREW", "X" * 300):
            http.request(method, "/v1/models")
        text = http.get("/metrics").text
    assert 'preread_http_requests_total{method="other",route="unmatched",status="401"} 2.0' in text
    assert "BREW" not in text


def test_healthz_answers_while_all_threads_are_busy(site: Site, monkeypatch) -> None:
    corpus = site.corpus_of("c", {"a.txt": "words"})
    release = threading.Event()
    monkeypatch.setattr(site.parts.retriever, "search", lambda **_: release.wait(10) and [])

    def search() -> None:
        with site.http() as http:
            http.post(f"/v1/vector_stores/{corpus}/search", json={"query": "x"})

    threads = [threading.Thread(target=search) for _ in range(50)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    with site.http("") as http:
        http.get("/healthz")
        took = []
        for _ in range(10):
            started = time.perf_counter()
            assert http.get("/healthz").status_code == 200
            took.append(time.perf_counter() - started)
        started = time.perf_counter()
        ready = http.get("/readyz")
        ready_took = time.perf_counter() - started
    release.set()
    for thread in threads:
        thread.join()
    assert sorted(took)[5] < 0.05
    assert ready.status_code == 200
    assert ready_took < 2


def test_readyz_names_what_is_wrong(tmp_path: Path) -> None:
    from dataclasses import replace

    def broken() -> None:
        raise StorageUnavailable("password=hunter2")

    parts, _ = make_parts(tmp_path, EchoEngine(), [])
    parts = replace(parts, check_broker=broken, check_engine=lambda: time.sleep(4))
    with running(build_app(parts)) as url:
        reply = httpx.get(f"{url}/readyz", timeout=10)
        assert httpx.get(f"{url}/healthz").status_code == 200
    parts.catalogue.close()
    checks = reply.json()["checks"]
    assert reply.status_code == 503
    assert (checks["database"], checks["object_store"]) == ("ok", "ok")
    assert checks["engine"] == "no answer in time"
    assert checks["broker"].startswith("failed")
    assert "hunter2" not in reply.text


def test_a_store_that_is_away_is_a_503_to_come_back_from(site: Site, monkeypatch) -> None:
    def away(*_: object) -> None:
        raise StorageUnavailable("The object store does not answer.")

    monkeypatch.setattr(site.parts.objects, "size", away)
    with site.http() as http:
        reply = http.post("/v1/files", files={"file": ("a.txt", b"x")})
    assert refusal(reply) == (503, "storage_error")
    assert int(reply.headers["retry-after"]) < 120


def test_logs_hold_no_text_question_or_key(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    site.corpus_of("handbook", {"codeword-a.txt": "codeword-b of the document"})
    site.engine.fail_at = 1
    with site.http() as http:
        body = {"model": "echo-1@handbook", "messages": [{"role": "user", "content": "codeword-c ?"}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 500
        http.get("/v1/files/codeword-d")
    out, err = capfd.readouterr()
    assert "failure" in out + err
    assert "/v1/chat/completions" in out + err
    for secret in ("codeword", "secret text", site.admin_key, site.admin_key[3:]):
        assert secret not in out + err


REPEATED = "A repeated clause of the contract stands here and it has twelve words."
PAGES = [REPEATED, "Something else entirely is written on this page between the two others.", REPEATED]


def test_a_paragraph_on_two_pages_is_cited_where_it_stands(site: Site, monkeypatch) -> None:
    """Whichever copy is found, its page, its span and its quote belong together."""
    text = "\n\n".join(PAGES)
    starts = [text.index(PAGES[0]), text.index(PAGES[1]), text.rindex(PAGES[2])]
    parsed = ParsedDocument(
        text=text,
        blocks=tuple(Block("paragraph", s, s + len(p)) for s, p in zip(starts, PAGES, strict=True)),
        anchors=tuple(Anchor(s, page=n) for n, s in enumerate(starts, 1)),
    )
    monkeypatch.setattr(site.work.parser, "parse", lambda data, name, check: parsed)
    site.corpus_of("contract", {"contract.pdf": text})
    with site.http() as http:
        body = {"model": "echo-1@contract", "messages": [{"role": "user", "content": "repeated clause?"}]}
        citations = http.post("/v1/chat/completions", json=body).json()["citations"]
    assert len(citations) >= 2
    for cited in citations:
        assert text[cited["start"] : cited["end"]] == cited["quote"]
        assert PAGES[cited["page_start"] - 1] == cited["quote"].strip()
        assert starts[cited["page_start"] - 1] <= cited["start"] <= cited["end"]
        assert cited["line_start"] == text.count("\n", 0, cited["start"]) + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/api_keys", {"name": "x", "days": -1}),
        ("/v1/schedules", {"corpus_id": "vs_1", "cron": "0 6 * * *", "time_zone": "UTC"}),
        ("/v1/webhooks", {"url": "https://example.com/", "event": "job.failed"}),
        ("/v1/sites", {"name": "edge", "corpus": "vs_1"}),
        ("/v1/corpora/vs_1/sync", {"manifest": [], "dryrun": True}),
        ("/v1/corpora/vs_1/sync", {"manifest": [{"path": "a", "sha256": "0" * 64, "sha1": "x"}]}),
        ("/v1/jobs/job-1/retry", {"files": "all"}),
    ],
)
def test_a_field_that_is_not_known_is_refused_and_not_passed_over(site: Site, path: str, body: dict[str, Any]) -> None:
    """A misspelt limit that is passed over leaves a key without one."""
    with site.http() as http:
        refused = http.post(path, json=body)
    assert refused.status_code == 400, refused.text
    unknown = ({"days", "time_zone", "event", "corpus", "dryrun", "files"} & set(body) or {"sha1"}).pop()
    assert unknown in refused.json()["error"]["message"] + str(refused.json()["error"]["param"])
