"""Clients that ask and do not read: a real server, real sockets with small buffers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from api_kit import EchoEngine, make_parts
from engine_kit import EngineSite, drain

from serving.api import unread
from serving.api.app import build_app
from serving.auth import ensure_admin_key
from serving.engine import generation
from storage.errors import Cancelled

SMALL = 4096  # bytes; the kernel doubles it
PIECE = 2000  # characters


@dataclass
class Served:
    server: uvicorn.Server
    engine: EchoEngine
    port: int
    key: str

    def ask(self, stream: bool) -> socket.socket:
        """A connection on which a chat was asked for and nothing is read."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        client.connect(("127.0.0.1", self.port))
        body = json.dumps(self.body("hello", stream)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
        client.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        return client

    @staticmethod
    def body(question: str, stream: bool) -> dict[str, object]:
        return {"model": "echo-1", "stream": stream, "messages": [{"role": "user", "content": question}]}

    def others_are_answered(self) -> None:
        url, headers = f"http://127.0.0.1:{self.port}/v1/chat/completions", {"authorization": f"Bearer {self.key}"}
        said, self.engine.answer = self.engine.answer, None
        try:
            reply = httpx.post(url, json=self.body("hello there", False), headers=headers, timeout=30)
        finally:
            self.engine.answer = said
        assert reply.json()["choices"][0]["message"]["content"] == "hello there"

    def connections(self) -> int:
        return len(self.server.server_state.connections)


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    engine = EchoEngine()
    parts, _ = make_parts(folder, engine, [])
    key = ensure_admin_key(parts.catalogue, parts.secret)
    assert key is not None
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)  # connections have it of their listener
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(build_app(parts), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        until(lambda: server.started, "the start")
        yield Served(server, engine, listener.getsockname()[1], key)
    finally:
        server.should_exit = True
        thread.join()
        parts.catalogue.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made


def until(look: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def everything(client: socket.socket) -> int:
    """Bytes that can still be read."""
    total = 0
    client.settimeout(30)
    while True:
        try:
            piece = client.recv(1 << 16)
        except ConnectionResetError:
            return total
        if not piece:
            return total
        total += len(piece)


@pytest.mark.parametrize("bytes_each", [0, 1])
def test_who_does_not_read_a_stream_is_cut_off_and_others_never_notice(
    served: Served, monkeypatch: pytest.MonkeyPatch, bytes_each: int
) -> None:
    monkeypatch.setattr(unread, "STALLED_SECONDS", 2.0)
    served.engine.answer = " ".join(["x" * PIECE] * 2000)
    client = served.ask(stream=True)

    def cut() -> bool:
        if bytes_each:
            client.recv(bytes_each)
        return bool(served.engine.generations) and served.engine.generations[0].cancelled_at is not None

    until(lambda: bool(served.engine.generations), "the question's arrival")
    served.others_are_answered()
    until(cut, "the end of the answer")
    until(lambda: not served.connections(), "the end of the connection")
    assert everything(client) < 200_000, "the rest of the 4 MB was never made"
    client.close()
    served.others_are_answered()


def test_who_reads_slowly_but_steadily_gets_all_of_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "STALLED_SECONDS", 4.0)
    served.engine.answer = " ".join(["x" * PIECE] * 200)
    client, got, begun = served.ask(stream=True), b"", time.monotonic()
    while not got.endswith(b"0\r\n\r\n"):
        piece = client.recv(40_000)
        assert piece, "cut off"
        got += piece
        time.sleep(0.04)
    assert got.count(b"x" * PIECE) == 200
    assert b"[DONE]" in got
    assert time.monotonic() - begun > 4.0, "no piece took that long, all of them together did"
    client.close()


def test_what_is_left_of_a_finished_answer_is_not_kept_for_ever(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "STALLED_SECONDS", 1.0)
    served.engine.answer = "x" * 50_000  # less than the server's buffer: it is handed over at once
    client = served.ask(stream=False)
    until(lambda: any(g.outcome for g in served.engine.generations), "the answer")
    until(lambda: not served.connections(), "the end of the connection")
    assert everything(client) < 50_000
    client.close()


def test_who_reads_the_rest_in_time_keeps_the_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "STALLED_SECONDS", 1.0)
    served.engine.answer = "x" * 50_000
    client = served.ask(stream=False)
    until(lambda: any(g.outcome for g in served.engine.generations), "the answer")
    everything_of_one = b""
    while everything_of_one.count(b"x") < 50_000:
        everything_of_one += client.recv(1 << 16)
    time.sleep(1.5)
    assert served.connections() == 1
    client.close()


def test_an_answer_that_nobody_takes_is_given_up_by_the_engine(
    engine_site: EngineSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "BACKLOG", 8)

    async def ask() -> None:
        unread_answer = engine_site.engine.submit(engine_site.request(max_tokens=300))
        for _ in range(200):
            await asyncio.sleep(0.05)
            if unread_answer.cancelled.is_set():
                break
        outcome = await drain(engine_site.engine.submit(engine_site.request(max_tokens=4)))
        assert outcome.completion_tokens <= 4
        taken = aiter(unread_answer)
        assert all([(await anext(taken)).text for _ in range(8)])
        with pytest.raises(Cancelled, match="too slowly"):
            await anext(taken)

    asyncio.run(ask())
