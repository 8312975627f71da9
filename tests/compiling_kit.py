"""A small server that compiles chunks as vLLM with our connector does: it believes a signed plan, and stores what it says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from vllm_server_kit import Answering

from serving.connector.plan import Plan, Span, Told, plan_secret, verify
from storage.kvstore import KVStore
from storage.types import KVRecord

SECRET = b"a master secret for tests only, 32 bytes"


@dataclass
class Compiling:
    """`how`: by the number of a prompt, what becomes of it (status, plain, refuse, lose, late or other), by default nothing
    special; `compute(prompt, span)`: a span's KV; `gate`: prompts wait until it is open; `left`: somebody has gone."""

    store: KVStore
    compute: Callable[[list[int], Span], torch.Tensor]
    url: str = ""
    how: Callable[[int], str] = lambda number: ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    at_once: int = 0
    most: int = 0
    left: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, body: dict[str, Any]) -> str:
        with self.lock:
            self.bodies.append(body)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            return self.how(len(self.bodies) - 1)

    def compile(self, body: dict[str, Any], how: str) -> Told:
        plan = verify(body["kv_transfer_params"], plan_secret(SECRET), body["prompt"], time.time())
        assert isinstance(plan, Plan), plan
        self.plans.append(plan)
        if how == "refuse":
            return Told(refused="The model's KV is latent (MLA).")
        if how == "late":
            threading.Timer(0.3, self.save, (body["prompt"], plan)).start()
        elif how != "lose":
            self.save(body["prompt"], plan, 1 if how == "other" else 0)
        return Told()

    def save(self, prompt: list[int], plan: Plan, off: int = 0) -> None:
        for span in plan.saves:
            ids = tuple(prompt[span.start - off : span.end - off])
            self.store.put(KVRecord(span.key, plan.profile_of(span), ids, self.compute(prompt, span)))


def _handler(server: Compiling) -> type[Answering]:
    class Handler(Answering):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "served-under-this-name", "max_model_len": 2048}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            how = server.begin(body)
            try:
                if not server.gate.is_set():
                    self.wait()
                if how.isdigit():
                    self.answer({"error": {"message": "as asked", "code": int(how)}}, int(how))
                    return
                told = None if how == "plain" else server.compile(body, how).params()
                self.answer({"choices": [{"text": ""}], "kv_transfer_params": told})
            except OSError:
                server.left.set()
            finally:
                with server.lock:
                    server.at_once -= 1

        def wait(self) -> None:
            self.connection.settimeout(0.05)
            while not server.gate.is_set():
                try:
                    if self.connection.recv(1) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    continue
            self.connection.settimeout(None)

    return Handler


@contextmanager
def compiling(store: KVStore, compute: Callable[[list[int], Span], torch.Tensor]) -> Iterator[Compiling]:
    """The server on a free port of loopback, its gate open."""
    made = Compiling(store, compute)
    made.gate.set()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(made))
    http.daemon_threads = True
    made.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.gate.set()
        http.shutdown()
        http.server_close()
        thread.join()


def of_tokens(layers: int, kv_heads: int, head_dim: int) -> Callable[[list[int], Span], torch.Tensor]:
    """KV made of a span's token ids, and of where it stands in no way."""

    def compute(prompt: list[int], span: Span) -> torch.Tensor:
        ids = torch.tensor([i % 97 for i in prompt[span.start : span.end]], dtype=torch.float32)
        return ids.view(1, 1, 1, -1, 1).expand(layers, 2, kv_heads, -1, head_dim)

    return compute
