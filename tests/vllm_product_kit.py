"""The whole product as processes, `preread up`: with vLLM as its engine, or without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from serving.local_broker import free_port

ROOT = Path(__file__).parents[1]
VLLM = ROOT / "build" / "vllm"
START_S = 900.0
SECRET = "a master secret for tests only, 32 bytes"


@dataclass
class Product:
    """`preread up`, and a client of it. `vllm_url`: where vLLM answers, if it is the engine."""

    process: subprocess.Popen[str]
    data: Path
    http: httpx.Client
    vllm_url: str

    def corpus(self, files: Mapping[str, str], name: str = "notes") -> str:
        corpus: str = self.http.post("/v1/vector_stores", json={"name": name}).json()["id"]
        self.ended(self.upload(corpus, files))
        return corpus

    def upload(self, corpus: str, files: Mapping[str, str]) -> str:
        """The job that ingests them."""
        sent = [("files", (path, text.encode())) for path, text in files.items()]
        job: str = self.http.post(f"/v1/corpora/{corpus}/documents", files=sent).json()["id"]
        return job

    def job(self, job: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.http.get(f"/v1/jobs/{job}").json()
        return shown

    def ended(self, job: str) -> dict[str, Any]:
        """The job when it has come to its end, which is a good one."""
        wait(lambda: self.job(job)["status"] not in ("queued", "in_progress"), START_S)
        shown = self.job(job)
        assert shown["status"] == "completed", shown
        return shown

    def body(self, corpus: str, question: str, method: str, **changes: Any) -> dict[str, Any]:
        model = min((each["id"] for each in self.http.get("/v1/models").json()["data"]), key=len)
        return {
            "model": f"{model}@{corpus}", "messages": [{"role": "user", "content": question}], "max_tokens": 16,
            "preread": {"method": method}, **changes,
        }  # fmt: skip

    def ask(self, corpus: str, question: str, method: str, **changes: Any) -> Any:
        answer = self.http.post("/v1/chat/completions", json=self.body(corpus, question, method, **changes))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def child(self, name: str) -> int:
        """The process id of a child whose command line has this word."""
        asked = ["pgrep", "-P", str(self.process.pid), "-f", name]
        return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0])


@contextmanager
def product(data: Path, model: Path, *, dtype: str, vllm: bool = True) -> Iterator[Product]:
    """The product on a data folder, which outlives it."""
    port, url = free_port(), f"http://127.0.0.1:{free_port()}"
    settings = {
        "DATA_DIR": data, "PORT": port, "VLLM_URL": url, "MODEL": model, "THREADS": 1, "DTYPE": dtype, "SECRET": SECRET,
    }  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREREAD_")}
    environ = kept | {f"PREREAD_{name}": str(value) for name, value in settings.items()} | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "serving.cli", "up", "--json", *(("--vllm", str(VLLM)) if vllm else ())]
    log = data.with_name(data.name + ".log")
    with log.open("a") as out:
        process = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=out, text=True)
    assert process.stdout is not None
    try:
        welcome = json.loads(process.stdout.readline() or "{}")
        assert welcome.get("started"), log.read_text()
        headers = {"authorization": f"Bearer {(data / 'admin.key').read_text().strip()}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=600) as http:
            yield Product(process, data, http, url)
    finally:
        process.terminate()
        process.wait(120)
        process.stdout.close()


def wait(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.5)
