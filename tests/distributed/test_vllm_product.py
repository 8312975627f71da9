"""The whole product on a real vLLM: answers are blended there, and its death is survived."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_product_kit import START_S, VLLM, Product, product, wait

NOTES = "# Lamps\n\nThe lamp on the north pier is lit at nine. Its oil costs four crowns a week.\n"
QUESTION = "When is the lamp on the north pier lit?"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (VLLM / "bin" / "vllm").exists(), reason="vLLM is not installed: make vllm"),
]


@pytest.fixture(scope="module")
def lamps(tmp_path_factory: pytest.TempPathFactory, embedded_folder: Path) -> Iterator[Product]:
    with product(tmp_path_factory.mktemp("product") / "data", embedded_folder, dtype="float32") as made:
        yield made


def test_chunks_are_blended_in_vllm_and_computing_all_again_is_full_prefill(lamps: Product) -> None:
    corpus = lamps.corpus({"lamps.md": NOTES})
    full, exact, default = (lamps.ask(corpus, QUESTION, m, logprobs=True) for m in ("full", "cacheblend:1.0", "default"))
    assert full["preread"]["tokens_reused"] == 0
    assert default["preread"]["tokens_reused"] + default["preread"]["tokens_recomputed"] > 0
    assert not default["preread"]["not_reused"]
    assert len(default["preread"]["reused"]) == default["preread"]["chunks"] == 1
    told = [[(t["token"], t["logprob"]) for t in each["choices"][0]["logprobs"]["content"]] for each in (full, exact)]
    assert [token for token, _ in told[0]] == [token for token, _ in told[1]]
    assert max(abs(a - b) for (_, a), (_, b) in zip(*told, strict=True)) < 1e-3


def test_an_answer_holds_to_a_json_schema(lamps: Product) -> None:
    schema = {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"], "additionalProperties": False}
    shape = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema}}
    corpus = lamps.http.get("/v1/vector_stores").json()["data"][0]["id"]
    answer = lamps.ask(corpus, QUESTION, "default", response_format=shape, max_tokens=40)
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["hour"], int)


def test_vllm_killed_in_mid_stream_is_an_error_event_then_503_and_after_its_restart_answers_again(lamps: Product) -> None:
    corpus, seen = lamps.http.get("/v1/vector_stores").json()["data"][0]["id"], []
    body = lamps.body(corpus, QUESTION, "default", stream=True, ignore_eos=True, max_tokens=1000)
    with lamps.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in filter(None, reply.iter_lines()):
            if line.startswith("data: "):
                seen.append(line[6:])
            if line.startswith("data: ") and len(seen) == 4:
                os.kill(lamps.child("bin/vllm"), signal.SIGKILL)
    assert seen[-1] == "[DONE]"
    assert json.loads(seen[-2])["error"]["code"] == "engine_unavailable"
    refused = lamps.http.post("/v1/chat/completions", json=lamps.body(corpus, QUESTION, "default"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    wait(lambda: lamps.http.get("/readyz").status_code == 200, START_S)
    assert lamps.ask(corpus, QUESTION, "default")["choices"][0]["message"]["content"]
