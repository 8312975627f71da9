"""The API over the engine before vLLM: statuses, error events, readiness, and what a client may not send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_kit import SECRET, Site, make_parts, running
from fixtures_models import Models
from vllm_server_kit import Trouble, VLLMServer, VLLMSite, vllm_server, vllm_site

from serving.api.app import build_app
from serving.auth import ensure_admin_key

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(tiny_models: Models) -> Iterator[VLLMServer]:
    with vllm_server(tiny_models.reader("llama")) as made:
        yield made


@pytest.fixture
def vllm(server: VLLMServer, tiny_models: Models) -> Iterator[VLLMSite]:
    server.trouble, server.pause, server.well = Trouble(), 0.0, True
    server.bodies.clear(), server.given_up.clear()
    with vllm_site(server, tiny_models.folder("llama")) as made:
        yield made


@pytest.fixture
def api(vllm: VLLMSite, tmp_path: Path) -> Iterator[httpx.Client]:
    with served(vllm, tmp_path) as made:
        yield made


@contextmanager
def served(vllm: VLLMSite, folder: Path) -> Iterator[httpx.Client]:
    parts, work = make_parts(folder, vllm.engine, [])  # type: ignore[arg-type]
    parts = replace(parts, check_engine=vllm.engine.check)
    key = ensure_admin_key(parts.catalogue, SECRET)
    assert key is not None
    with running(build_app(parts)) as url:
        site = Site(url, parts, vllm.engine, work, key, [])  # type: ignore[arg-type]
        with site.http() as http:
            yield http
    parts.catalogue.close()


def question(**changes: Any) -> dict[str, Any]:
    return {"model": "llama", "messages": [{"role": "user", "content": "How much is it?"}], "max_tokens": 8, **changes}


def events(reply: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_and_a_completion_are_answered_whole_and_streamed_alike(api: httpx.Client) -> None:
    whole = api.post(CHAT, json=question(n=2, ignore_eos=True)).json()
    text = whole["choices"][0]["message"]["content"]
    assert text
    assert whole["choices"][1]["message"]["content"] == text
    assert whole["usage"]["completion_tokens"] == 16
    assert whole["preread"]["tokens_computed"] + whole["preread"]["tokens_reused"] == whole["usage"]["prompt_tokens"]
    streamed = events(api.post(CHAT, json=question(stream=True, ignore_eos=True)))
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in streamed if e["choices"]) == text
    cited = api.post(COMPLETIONS, json={"model": "llama", "prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 2}).json()
    assert cited["usage"]["prompt_tokens"] == 3
    assert len(cited["choices"][0]["logprobs"]["tokens"]) == cited["usage"]["completion_tokens"]


@pytest.mark.parametrize("name", ["kv_transfer_params", "cache_salt", "vllm_xargs", "ec_transfer_params", "prompt_embeds"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_has_no_word_in_what_goes_to_vllm_beside_the_prompt(
    api: httpx.Client, vllm: VLLMSite, name: str, path: str
) -> None:
    asked = question() if path == CHAT else {"model": "llama", "prompt": "x"}
    refused = api.post(path, json={**asked, name: {"preread": {}}})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unknown_parameter"
    assert not vllm.server.bodies


@pytest.mark.parametrize("stream", [False, True])
def test_where_vllm_is_not_there_requests_get_503_at_once_and_readiness_names_the_engine(
    tiny_models: Models, server: VLLMServer, tmp_path: Path, stream: bool
) -> None:
    with vllm_site(replace(server, url="http://127.0.0.1:9"), tiny_models.folder("llama")) as vllm:
        with served(vllm, tmp_path) as api:
            refused = api.post(CHAT, json=question(stream=stream))
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["code"] == "engine_unavailable"
            ready = api.get("/readyz")
            assert ready.status_code == 503
            assert ready.json()["checks"]["engine"] == "failed: EngineUnavailable"
            assert api.get("/healthz").status_code == 200


def test_readiness_follows_vllms_health(api: httpx.Client, vllm: VLLMSite) -> None:
    assert api.get("/readyz").json()["checks"]["engine"] == "ok"
    vllm.server.well = False
    assert api.get("/readyz").json()["checks"]["engine"] == "failed: EngineUnavailable"


@pytest.mark.parametrize("how", ["break", "error"])
def test_a_stream_that_vllm_breaks_off_ends_with_an_error_event_and_the_next_request_is_answered(
    api: httpx.Client, vllm: VLLMSite, how: str
) -> None:
    vllm.server.trouble = Trouble(after=3, how=how)
    *_, last = events(api.post(CHAT, json=question(stream=True, ignore_eos=True, max_tokens=50)))
    assert last["error"]["code"] == "engine_unavailable"
    assert last["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(last)
    whole = api.post(CHAT, json=question(ignore_eos=True, max_tokens=50))
    assert (whole.status_code, whole.headers["retry-after"]) == (503, "5")
    vllm.server.trouble = Trouble()
    assert api.post(CHAT, json=question()).status_code == 200


def test_what_vllm_does_not_serve_is_one_clear_400(api: httpx.Client, vllm: VLLMSite) -> None:
    vllm.server.trouble = Trouble(status=400)
    refused = api.post(CHAT, json=question())
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "vLLM does not serve this request: structured outputs do not know this."


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_vllms_work(api: httpx.Client, vllm: VLLMSite, stream: bool) -> None:
    vllm.server.pause = 0.05
    body = question(stream=stream, ignore_eos=True, max_tokens=600)

    async def leave_in_the_middle() -> None:
        async with httpx.AsyncClient(base_url=api.base_url, headers=api.headers, timeout=60) as client:
            asking = asyncio.create_task(client.post(CHAT, json=body))
            while not vllm.server.bodies and not asking.done():
                await asyncio.sleep(0.02)
            asking.cancel()

    asyncio.run(leave_in_the_middle())
    assert vllm.server.given_up.wait(20)
