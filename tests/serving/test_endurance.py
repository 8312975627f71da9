"""An API process on its own over hundreds of chats, and under a long prefill. Figures are printed (`pytest -s`)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from model_kit import SECRET, Shared, serving

from serving.local_broker import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
WARM_UP, CHATS = 100, 500
GROWTH = 0.08
HEALTH_MS = 50.0
POLLER = """
import http.client, json, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
taken = []
print("polling", flush=True)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    begun = time.perf_counter()
    connection.request("GET", "/healthz")
    assert connection.getresponse().read() == b'{"status":"ok"}'
    taken.append(1000 * (time.perf_counter() - begun))
    time.sleep(0.02)
print(json.dumps(taken))
"""


@dataclass
class Api:
    pid: int
    port: int
    client: openai.OpenAI
    model: str

    def chat(self, question: str, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": question}]
        return self.client.chat.completions.create(
            **{"model": f"{self.model}@harbour", "messages": messages, "max_tokens": 2, **options}
        )

    def resident(self) -> int:
        """Bytes of memory in use."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @contextmanager
    def polled(self, seconds: float) -> Iterator[list[float]]:
        """Milliseconds of each /healthz, asked for by another process every 20 ms; filled when the block ends."""
        taken: list[float] = []
        command = [sys.executable, "-c", POLLER, str(self.port), str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as poller:
            assert poller.stdout is not None
            assert poller.stdout.readline() == "polling\n"
            yield taken
            taken += json.loads(poller.stdout.readline())
        assert poller.returncode == 0


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, embedded: Shared) -> Iterator[Api]:
    """`preread serve` with two threads over a corpus whose KV is stored."""
    data = tmp_path_factory.mktemp("endurance")
    with serving(embedded, data) as service:
        lines = (f"Berth {n} is swept by watch {n % 7} before tide {n * 3} turns." for n in range(60))
        service.corpus("harbour", {"berths.txt": "\n\n".join(lines), "lamps.txt": "The lamps are lit at nine."})
        key = service.key
    port = free_port()
    own = {"DATA_DIR": data, "PORT": port, "MODEL": embedded.model, "THREADS": 2, "SECRET": SECRET, "TOP_K": 2}
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PREREAD_", "OMP_"))}
    environ |= {f"PREREAD_{name}": str(value) for name, value in own.items()}
    with (data / "serve.log").open("wb") as log:
        command = [sys.executable, "-m", "serving.cli", "serve"]
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait_until_ready(process, port, data / "serve.log")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, timeout=300) as client:
            yield Api(process.pid, port, client, client.models.list().data[0].id)
    finally:
        process.terminate()
        process.wait(20)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(log.read_text())


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def test_health_is_told_during_a_long_prefill(api: Api) -> None:
    def text(size: int, first: int = 1000) -> str:
        """Another one for each `first`: what was read before would be reused."""
        return " ".join(f"{first + n} tides came late on day {n + first}." for n in range(1000))[:size]

    size = int(4000 * 4000 / api.chat(text(4000), model=api.model, max_tokens=1).usage.prompt_tokens)
    firsts = itertools.count(2000, 1000)
    with api.polled(3.0) as idle:
        pass
    begun = time.monotonic()
    with api.polled(12.0) as busy:
        while time.monotonic() - begun < 11.0:
            answer = api.chat(text(size, next(firsts)), model=api.model, max_tokens=1)
            assert 3500 <= answer.usage.prompt_tokens <= 4500
            assert answer.usage.prompt_tokens_details.cached_tokens < 100  # what every prompt begins with
    for name, taken in (("idle", idle), ("prefill", busy)):
        p50, p99 = percentile(taken, 0.5), percentile(taken, 0.99)
        print(f"healthz {name}: n {len(taken)}, p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(taken):.1f} ms")  # noqa: T201
    assert len(busy) > 100
    assert percentile(busy, 0.99) < HEALTH_MS


def test_memory_stays_flat_over_hundreds_of_chats(api: Api) -> None:
    def ask(number: int) -> None:
        answer = api.chat(f"Which watch sweeps berth {number % 60}?")
        assert answer.preread["not_reused"] == []
        assert answer.usage.completion_tokens <= 2

    for number in range(WARM_UP):
        ask(number)
    before = api.resident()
    for number in range(CHATS):
        ask(number)
    growth = api.resident() / before - 1
    print(f"resident: {before / 2**20:.0f} MiB, {growth:+.1%} over {CHATS} chats")  # noqa: T201
    assert growth < GROWTH
