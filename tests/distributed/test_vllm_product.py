"""The whole product on a real vLLM: answers are blended there, and its death is survived."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.local_broker import free_port

ROOT = Path(__file__).parents[2]
VLLM = ROOT / "build" / "vllm"
START_S = 900.0
NOTES = "# Lamps\n\nThe lamp on the north pier is lit at nine. Its oil costs four crowns a week.\n"
QUESTION = "When is the lamp on the north pier lit?"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (VLLM / "bin" / "vllm").exists(), reason="vLLM is not installed: make vllm"),
]


class Product:
    """`preread up --vllm`, and a client of it."""

    def __init__(self, process: subprocess.Popen[str], data: Path, address: str) -> None:
        self.process = process
        key = (data / "admin.key").read_text().strip()
        self.http = httpx.Client(base_url=address, headers={"authorization": f"Bearer {key}"}, timeout=600)

    def corpus(self) -> str:
        corpus: str = self.http.post("/v1/vector_stores", json={"name": "notes"}).json()["id"]
        job = self.http.post(f"/v1/corpora/{corpus}/documents", files=[("files", ("lamps.md", NOTES.encode()))]).json()["id"]
        wait(lambda: self.http.get(f"/v1/jobs/{job}").json()["status"] == "completed", 300)
        return corpus

    def body(self, corpus: str, method: str, **changes: Any) -> dict[str, Any]:
        model = min((each["id"] for each in self.http.get("/v1/models").json()["data"]), key=len)
        return {
            "model": f"{model}@{corpus}", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16,
            "preread": {"method": method}, **changes,
        }  # fmt: skip

    def ask(self, corpus: str, method: str, **changes: Any) -> Any:
        answer = self.http.post("/v1/chat/completions", json=self.body(corpus, method, **changes))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def vllm(self) -> int:
        """The process id of vLLM's first process."""
        out = subprocess.run(["pgrep", "-P", str(self.process.pid), "-f", "bin/vllm"], capture_output=True, text=True, check=True)
        return int(out.stdout.split()[0])


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory, embedded_folder: Path) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("product")
    data, port = folder / "data", free_port()
    settings = {
        "DATA_DIR": data, "PORT": port, "VLLM_URL": f"http://127.0.0.1:{free_port()}", "MODEL": embedded_folder, "THREADS": 1,
        "DTYPE": "float32",
    }  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREREAD_")}
    environ = kept | {f"PREREAD_{name}": str(value) for name, value in settings.items()} | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "serving.cli", "up", "--json", "--vllm", str(VLLM)]
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        welcome = json.loads(process.stdout.readline() or "{}")
        assert welcome.get("started"), (folder / "up.log").read_text()
        made = Product(process, data, f"http://127.0.0.1:{port}")
        yield made
        made.http.close()
    finally:
        process.terminate()
        process.wait(120)
        process.stdout.close()


def test_chunks_are_blended_in_vllm_and_computing_all_again_is_full_prefill(product: Product) -> None:
    corpus = product.corpus()
    full, exact, default = (product.ask(corpus, method, logprobs=True) for method in ("full", "cacheblend:1.0", "default"))
    assert full["preread"]["tokens_reused"] == 0
    assert default["preread"]["tokens_reused"] + default["preread"]["tokens_recomputed"] > 0
    assert not default["preread"]["not_reused"]
    assert len(default["preread"]["reused"]) == default["preread"]["chunks"] == 1
    told = [[(t["token"], t["logprob"]) for t in each["choices"][0]["logprobs"]["content"]] for each in (full, exact)]
    assert [token for token, _ in told[0]] == [token for token, _ in told[1]]
    assert max(abs(a - b) for (_, a), (_, b) in zip(*told, strict=True)) < 1e-3


def test_an_answer_holds_to_a_json_schema(product: Product) -> None:
    schema = {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"], "additionalProperties": False}
    shape = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema}}
    corpus = product.http.get("/v1/vector_stores").json()["data"][0]["id"]
    answer = product.ask(corpus, "default", response_format=shape, max_tokens=40)
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["hour"], int)


def test_vllm_killed_in_mid_stream_is_an_error_event_then_503_and_after_its_restart_answers_again(product: Product) -> None:
    corpus, seen = product.http.get("/v1/vector_stores").json()["data"][0]["id"], []
    body = product.body(corpus, "default", stream=True, ignore_eos=True, max_tokens=1000)
    with product.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in filter(None, reply.iter_lines()):
            if line.startswith("data: "):
                seen.append(line[6:])
            if line.startswith("data: ") and len(seen) == 4:
                os.kill(product.vllm(), signal.SIGKILL)
    assert seen[-1] == "[DONE]"
    assert json.loads(seen[-2])["error"]["code"] == "engine_unavailable"
    refused = product.http.post("/v1/chat/completions", json=product.body(corpus, "default"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    wait(lambda: product.http.get("/readyz").status_code == 200, START_S)
    assert product.ask(corpus, "default")["choices"][0]["message"]["content"]


def wait(holds: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.5)
