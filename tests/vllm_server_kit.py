"""A small server that speaks as much of vLLM's HTTP interface as the engine uses, with a tiny model behind it.

It verifies plans and keeps what it tells of them with the connector's own code, and computes every prompt in full."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from fixtures_models import retrieved

from precompute.reader import Reader
from precompute.spec import ReaderSpec
from serving.connector.asked import Kept
from serving.connector.plan import Plan, Told, plan_secret, verify
from serving.engine.types import Delta, GenerateRequest, Message, Outcome
from serving.engine.vllm import VLLMEngine
from storage.types import RetrievedChunk

SECRET = b"a master secret for tests only, 32 bytes"
TOKENS = (30, 45, 60)
SILENT_S = 20.0


@dataclass
class Trouble:
    """What goes wrong. `status`: of the answer; `after`: so many tokens, then `how`: break | error | end | silence."""

    status: int = 200
    after: int = 1 << 30
    how: str = ""


@dataclass
class Cached:
    """Whole prompts that have been read: vLLM's own, and those of a cache behind it (None: there is none). `busy`: how often
    vLLM's own cannot be emptied yet."""

    own: set[str] = field(default_factory=set)
    behind: set[str] | None = None
    busy: int = 0
    hits: dict[str, int] = field(default_factory=lambda: {"": 0, "external_": 0})

    def read(self, body: Mapping[str, Any]) -> None:
        prompt = repr((body["prompt"], body["cache_salt"]))
        if prompt in self.own:
            self.hits[""] += len(body["prompt"])
        elif prompt in (self.behind or ()):
            self.hits["external_"] += len(body["prompt"])
        self.own.add(prompt)
        if self.behind is not None:
            self.behind.add(prompt)

    def reset(self) -> bool:
        self.busy -= 1
        if self.busy < 0:
            self.own.clear()
        return self.busy < 0

    def metrics(self) -> str:
        lines = [f'vllm:{kind}prefix_cache_hits_total{{engine="0",model_name="m"}} {n:.1f}' for kind, n in self.hits.items()]
        return "\n".join(["# TYPE vllm:prefix_cache_hits_total counter", *lines, "vllm:other_total{} 3.0", ""])


@dataclass
class VLLMServer:
    """`bodies`: what was posted, asks apart; `told`: what is told of the next plans; `given_up`: answers that nobody read to
    their end."""

    reader: Reader
    url: str = ""
    trouble: Trouble = field(default_factory=Trouble)
    pause: float = 0.0
    told: Told | None = field(default_factory=lambda: Told(reused=100, recomputed=35, blend_ms=3.0))
    well: bool = True
    name: str = "what-it-is-called-there"
    length: int = 1024
    bodies: list[dict[str, Any]] = field(default_factory=list)
    plans: list[Plan | str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    given_up: threading.Event = field(default_factory=threading.Event)
    kept: Kept = field(default_factory=Kept)
    cached: Cached = field(default_factory=Cached)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tokens_of(self, body: Mapping[str, Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """Greedy tokens with the log-probabilities that they were chosen from."""
        ids, most = body["prompt"], body["max_tokens"]
        kv = self.reader.buffer(len(ids) + most)
        with self.lock:
            logits = self.reader.prefill(kv, ids)
        for at in range(len(ids), len(ids) + most):
            assert logits is not None
            token = int(logits.argmax())
            yield token, torch.log_softmax(logits, -1)
            if token in body["stop_token_ids"]:
                return
            with self.lock:
                logits = self.reader.prefill(kv, [token], at)


class Answering(BaseHTTPRequestHandler):
    """Answers with JSON or text, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: Any, status: int = 200) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _handler(server: VLLMServer) -> type[Answering]:
    class Handler(Answering):
        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer({}, 200 if server.well else 503)
            elif self.path == "/metrics":
                self.answer(server.cached.metrics())
            else:
                self.answer({"data": [{"id": server.name, "max_model_len": server.length}]})

        def do_POST(self) -> None:
            if self.path == "/reset_prefix_cache":
                self.answer({"success": server.cached.reset()})
                return
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            params = body.get("kv_transfer_params")
            if "preread_told" in (params or {}):
                self.answer({"choices": [], "kv_transfer_params": server.kept.finished(params, None)})
                return
            server.bodies.append(body)
            server.cached.read(body)
            server.tokens.append(self.headers.get("authorization"))
            if params is not None:
                server.plans.append(verify(params, plan_secret(SECRET), body["prompt"], time.time()))
                server.kept.finished(params, server.told.params() if server.told else None)
            if body["model"] != server.name:
                self.answer({"error": {"message": "no such model", "code": 404}}, 404)
            elif server.trouble.status != 200:
                message = "structured outputs do not know this\nTraceback"
                self.answer({"error": {"message": message, "code": server.trouble.status}}, server.trouble.status)
            else:
                self.stream(body)

        def stream(self, body: Mapping[str, Any]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            try:
                self.say(body)
            except OSError:
                server.given_up.set()
            self.close_connection = True

        def say(self, body: Mapping[str, Any]) -> None:
            self.wfile.write(b": a comment that keeps the connection alive\n\n")
            trouble, count = server.trouble, 0
            for count, (token, likely) in enumerate(server.tokens_of(body), 1):
                if count > trouble.after:
                    self.fail(trouble.how)
                    return
                time.sleep(server.pause)
                ended = "stop" if token in body["stop_token_ids"] else "length" if count == body["max_tokens"] else None
                self.event({"choices": [_choice(body, token, likely, ended)]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            self.event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 7}}})
            self.wfile.write(b"data: [DONE]\n\n")

        def fail(self, how: str) -> None:
            if how == "error":
                self.event({"error": {"message": "EngineCore died: secret text of a document", "code": 500}})
            elif how == "silence":
                time.sleep(SILENT_S)
            elif how == "break":
                self.connection.shutdown(socket.SHUT_RDWR)

        def event(self, body: Mapping[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())

    return Handler


def _choice(body: Mapping[str, Any], token: int, likely: torch.Tensor, ended: str | None) -> dict[str, Any]:
    told = None
    if (most := body.get("logprobs")) is not None:
        values, ids = likely.topk(max(1, most))
        top = {f"token_id:{i}": v for i, v in zip(ids.tolist(), values.tolist(), strict=True)}
        top.setdefault(f"token_id:{token}", float(likely[token]))
        told = {"tokens": [f"token_id:{token}"], "token_logprobs": [float(likely[token])], "top_logprobs": [top]}
    return {"index": 0, "text": "", "token_ids": [token], "logprobs": told, "finish_reason": ended}


@contextmanager
def vllm_server(reader: Reader, port: int = 0) -> Iterator[VLLMServer]:
    """The server on a port of loopback (0: a free one)."""
    made = VLLMServer(reader)
    http = ThreadingHTTPServer(("127.0.0.1", port), _handler(made))
    http.daemon_threads = True
    made.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@dataclass
class VLLMSite:
    """The engine before a server, with three chunks that have keys."""

    server: VLLMServer
    engine: VLLMEngine
    chunks: tuple[RetrievedChunk, ...]

    def request(self, question: str = "How much is a ticket?", **changes: Any) -> GenerateRequest:
        return replace(GenerateRequest((Message("user", question),), self.chunks, max_tokens=12), **changes)

    def answer(self, request: GenerateRequest) -> tuple[Outcome, list[Delta]]:
        """The outcome, and the pieces that it came in."""
        return asyncio.run(self._answer(request))

    async def _answer(self, request: GenerateRequest) -> tuple[Outcome, list[Delta]]:
        prepared = await asyncio.to_thread(self.engine.prepare, request)
        generation = self.engine.submit(request, prepared)
        deltas = [delta async for delta in generation]
        assert generation.outcome is not None
        return generation.outcome, deltas


def keyed_chunks(lengths: Sequence[int] = TOKENS) -> tuple[RetrievedChunk, ...]:
    generator = torch.Generator().manual_seed(5)
    ids = [tuple(torch.randint(10, 400, (n,), generator=generator).tolist()) for n in lengths]
    return tuple(retrieved(n, i, f"{n:064x}") for n, i in enumerate(ids))


@cache
def spec_of(folder: Path) -> ReaderSpec:
    """Loading a tokenizer takes longer than any test here."""
    return ReaderSpec(folder, dtype="float32", filler=1)


@contextmanager
def vllm_site(server: VLLMServer, folder: Path, **options: Any) -> Iterator[VLLMSite]:
    """An engine that knows the model's folder only."""
    owners = lambda keys: frozenset({("tenant-a", "group-a")})  # noqa: E731
    engine = VLLMEngine(spec_of(folder), server.url, secret=SECRET, owners=owners, **options)
    try:
        yield VLLMSite(server, engine, keyed_chunks())
    finally:
        engine.close()
