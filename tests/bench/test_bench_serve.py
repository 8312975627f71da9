"""`bench serve`: that it counts from when a request was due, tells shed from failed, and sees a leak."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench import endurance, idle_streams, serve
from bench.endurance import growth
from bench.open_loop import Asked, offer, schedule, summary
from storage.errors import ModelUnsupported, UserError


def event(**delta: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode()


@contextmanager
def answering(behaviours: list[Any]) -> Iterator[Any]:
    """Runs a test's coroutine beside a server whose connections behave in turn."""

    async def served(work: Any) -> Any:
        turns = iter(behaviours)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await next(turns)(writer)
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await work(f"http://127.0.0.1:{port}")

    yield lambda work: asyncio.run(served(work))


async def _answers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    writer.write(event(role="assistant", content="") + b": waiting\n\n" + event(content="a"))
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.write(event(content="b") + b"data: [DONE]\n\n")
    await writer.drain()


async def _sheds(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 No\r\nretry-after: 7\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
    await writer.drain()


async def _breaks(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\nconnection: close\r\n\r\n")
    writer.write(event(content="a"))
    await writer.drain()


async def _fails(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + event(content="a"))
    writer.write(b'data: {"error":{"code":"internal_error"}}\n\ndata: [DONE]\n\n')
    await writer.drain()


def test_answers_refusals_breaks_and_errors_are_told_apart() -> None:
    with answering([_answers, _sheds, _breaks, _fails]) as beside:
        asked = beside(lambda url: offer(url, "k", [{}], [0.0, 0.2, 0.4, 0.6]))
    row = summary(asked, 10, ttft_limit=60)
    assert (row["offered"], row["answered"], row["shed"], row["shed_with_retry_after"]) == (4, 1, 1, 1)
    assert row["errors"] == {"RemoteProtocolError": 1, "internal_error": 1}
    assert row["goodput_per_s"] == 0.1
    assert row["inter_token_s"]["p50"] >= 0.09
    assert row["retry_after_s"]["p50"] == 7


def test_a_client_that_was_kept_from_sending_counts_from_when_the_request_was_due() -> None:
    async def blocked(url: str) -> list[Asked]:
        async def block() -> None:
            await asyncio.sleep(0.05)
            time.sleep(1.0)  # the client has no time to send

        asked, _ = await asyncio.gather(offer(url, "k", [{}], [0.2]), block())
        return asked

    with answering([_answers]) as beside:
        [one] = beside(blocked)
    assert one.ttft is not None
    assert one.ttft > 0.8


def test_only_first_tokens_within_the_limit_are_goodput() -> None:
    asked = [Asked(0.0, 200, ttft=float(seconds), finished=True) for seconds in range(10)]
    assert summary(asked, 2, ttft_limit=4)["goodput_per_s"] == 2.5
    assert summary(asked, 2, ttft_limit=4)["ttft_s"]["p50"] == 4.5
    assert summary([], 2, ttft_limit=4)["ttft_s"] is None
    assert summary(asked[3:4], 2, ttft_limit=4)["ttft_s"] == {"p50": 3, "p95": 3, "p99": 3}


def test_arrivals_are_poisson_and_the_same_for_a_seed() -> None:
    times = schedule(5.0, 2000, seed=3)
    assert times == schedule(5.0, 2000, seed=3) != schedule(5.0, 2000, seed=4)
    assert 9_600 < len(times) < 10_400
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05), "exponential gaps: as wide as they are long"


def test_nonsense_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    given: dict[str, Any] = {"methods": ["full"], "ttft_limit": 1, "answer_tokens": 1, "out": None, "workdir": tmp_path}
    for rates, seconds in (([0.0], 1), ([1.0], -1), ([1e6], 60), ([], 1)):
        with pytest.raises(UserError):
            serve.run(rates=rates, seconds=seconds, url=None, key=None, **given)
    with pytest.raises(UserError, match="--key"):
        serve.run(rates=[1.0], seconds=1, url="http://127.0.0.1:1", key=None, **given)
    assert list(tmp_path.iterdir()) == []


def test_growth_sees_a_leak_through_noise_and_no_leak_in_noise_and_peaks() -> None:
    draw = random.Random(1)
    noise = [400 + draw.gauss(0, 2) for _ in range(40)]
    assert abs(growth(noise, 2000)["share"]) < 0.01
    assert abs(growth([*noise[:30], 900, *noise[31:]], 2000)["share"]) < 0.01
    warming = [400 - 200 * 0.5**n + value - 400 for n, value in enumerate(noise)]
    assert abs(growth(warming, 2000)["share"]) < 0.01
    leak = [value + 2 * n for n, value in enumerate(noise)]  # 80 MiB in 2,000 requests
    assert growth(leak, 2000)["share"] > 0.05
    assert growth(leak, 2000)["kib_per_request"] == pytest.approx(41, rel=0.1)


LEAKY = """
import sys
from serving.api import middleware
inner, kept = middleware.RequestShell.__call__, []
async def leaky(self, scope, receive, send):
    kept.append(bytearray(80_000))
    await inner(self, scope, receive, send)
middleware.RequestShell.__call__ = leaky
sys.argv = ["preread", "serve"]
from serving.cli import app
app()
"""
"""The most that memory may grow after the warm-up, and what a planted leak must exceed."""
FLAT = 0.05


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return endurance.tiny_model(tmp_path_factory.mktemp("tiny"))
    except ModelUnsupported as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_memory_is_flat_over_three_thousand_requests_of_all_kinds(tiny: Path, tmp_path: Path) -> None:
    record = endurance.run(requests=3000, out=None, workdir=tmp_path, model=str(tiny))
    print(json.dumps(record))  # noqa: T201
    assert record["unexpected"] == {}
    assert set(record["kinds"]) == set(endurance.KINDS)
    assert record["settings"] == {"memory_cache_bytes": 16 << 20, "blended_cache_bytes": 16 << 20}
    assert record["growth"]["serve"]["share"] < FLAT
    assert record["growth"]["worker"]["share"] < FLAT


KINDS = {
    "chat", "stream", "left", "responses", "completion", "plain", "embeddings", "search", "refused", "document", "parts",
    "events", "lists",
}  # fmt: skip


def test_the_mix_has_every_kind_of_request() -> None:
    assert set(endurance.KINDS) == KINDS
    assert sum(weight for weight, _ in endurance.KINDS.values()) == pytest.approx(1)


async def _begins(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n: waiting\n\n")
    await writer.drain()


async def _refuses(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
    await writer.drain()


def test_idle_streams_that_are_refused_are_no_measurement() -> None:
    async def opened(url: str) -> None:
        with pytest.raises(UserError, match=r"1 of 3 .* status 404"):
            await idle_streams._open_all(int(url.rpartition(":")[2]), b"GET / HTTP/1.1\r\n\r\n", 3)
        await asyncio.sleep(0.1)  # both ends have their time to close

    with answering([_begins, _refuses, _begins]) as beside:
        beside(opened)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_idle_streams_cost_less_than_50_kb_each(tiny: Path, tmp_path: Path) -> None:
    record = idle_streams.run(streams=200, out=None, workdir=tmp_path, model=str(tiny))
    print(json.dumps(record))  # noqa: T201
    assert record["streams"] == 200
    assert 0 < record["kib_per_stream"] * 1024 < 50_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_planted_leak_is_seen(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def leaky(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", LEAKY] if "serve" in command else command, **options)

    monkeypatch.setattr("bench.live_service.subprocess.Popen", leaky)
    record = endurance.run(requests=1000, out=None, workdir=tmp_path, model=str(tiny))
    assert record["growth"]["serve"]["share"] > FLAT
    assert record["growth"]["serve"]["kib_per_request"] > 20
