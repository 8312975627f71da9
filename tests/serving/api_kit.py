"""A real server on loopback over small real parts; only the engine is a stand-in: it repeats the question."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from described import DescribedClient
from fixtures_work import ParagraphParser, WordEmbedder, Work, empty_catalogue
from sqlalchemy.orm import Session

from ingest.egress import AllowedHosts
from ingest.sources import Reach
from retrieval.index import ChunkIndex, open_index
from retrieval.search import Retriever
from serving.api.app import build_app
from serving.api.drain import Drain
from serving.api.parts import ApiParts
from serving.auth import ensure_admin_key
from serving.engine.types import Delta, GenerateRequest, Generation, Outcome, Report
from serving.http_protocol import PatientProtocol
from serving.placement import Placement
from serving.settings import Settings
from serving.usage import Meter
from storage.catalogue.audit import audit_key
from storage.catalogue.engine import open_catalogue
from storage.errors import Cancelled, Overloaded, PrereadError, Stopping
from storage.folder import FolderStore
from storage.kvstore import KVStore
from storage.policy.file import PolicyFile
from storage.tier_control import ChainControl

LISTED = "127.0.0.1:9"  # the one place where sources and webhooks may lead; nothing listens there
SECRET = b"a master secret for tests only, 32 bytes"


class EchoGeneration:
    """Says the first source's label, then the question, a word at a time."""

    def __init__(self, engine: EchoEngine, request: GenerateRequest) -> None:
        self.engine = engine
        self.request = request
        self.outcome: Outcome | None = None
        self.cancelled_at: float | None = None
        self._stop = asyncio.Event()
        self._why: PrereadError = Cancelled("stopped")
        self._loop = asyncio.get_running_loop()
        self._said: list[str] | None = None

    def so_far(self) -> Outcome | None:
        if self._said is None:
            return None
        used = self.request.chunks
        prompt = 10 + sum(len(chunk.token_ids) for chunk in used)
        report = Report(method=self.request.method, chunks=len(used), tokens_reused=prompt - 10, tokens_computed=10)
        report.ms = {"first_token": 1.0}
        return self.outcome or Outcome("".join(self._said), "cancelled", prompt, len(self._said), used, report)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        engine, request = self.engine, self.request
        label = "[1] " if request.chunks and engine.answer is None else ""
        words = (label + engine.says(request)).split(" ")
        await self._wait(engine.first_pause)
        said = self._said = []
        for number, word in enumerate(words):
            if engine.fail_at == number:
                raise RuntimeError("secret text of a document")
            await self._wait(engine.pause)
            said.append(word if number == 0 else " " + word)
            yield Delta(said[-1])
        ended = self.so_far()
        assert ended is not None
        self.outcome = replace(ended, finish_reason="stop")

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds if seconds else 0.0001)
        except TimeoutError:
            return
        raise self._why

    def end(self, error: PrereadError) -> None:
        self._why = error
        self._loop.call_soon_threadsafe(self._stop.set)

    def cancel(self) -> None:
        if self.cancelled_at is None and self.outcome is None:
            self.cancelled_at = time.monotonic()
        self._stop.set()


@dataclass
class EchoEngine:
    """An engine without a model. Tests set its pauses and its troubles."""

    model_id: str = "echo-1"
    max_model_len: int = 4096
    full_prefill_reason: str | None = None
    first_pause: float = 0.0
    pause: float = 0.0
    fail_at: int | None = None
    refuse: Exception | None = None
    answer: str | None = None
    prepared: list[tuple[GenerateRequest, int]] = field(default_factory=list)  # with the thread's id
    loop_thread: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    generations: list[EchoGeneration] = field(default_factory=list)

    def says(self, request: GenerateRequest) -> str:
        if self.answer is not None:
            return self.answer
        return str(request.prompt) if request.prompt is not None else request.messages[-1].content

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        self.prepared.append((request, threading.get_ident()))
        return request

    def submit(self, request: GenerateRequest, prepared: GenerateRequest | None = None) -> Generation:
        if self.refuse is not None:
            raise self.refuse
        assert prepared is not None
        assert (prepared.prompt, prepared.messages) == (request.prompt, request.messages)
        self.loop_thread = threading.get_ident()
        self.requests.append(request)
        self.generations.append(EchoGeneration(self, request))
        return self.generations[-1]

    def check_room(self) -> None:
        if isinstance(self.refuse, Overloaded):
            raise self.refuse

    def canary_totals(self) -> tuple[int, float]:
        return 0, 0.0

    def check(self) -> None:
        return

    def drain(self) -> None:
        self.refuse = Stopping()

    def abandon(self) -> None:
        for generation in self.generations:
            generation.end(Stopping())

    def close(self) -> None:
        return None


class IngestSide:
    """The index as ingest hands rows to it: (chunk id, text, vector)."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index

    def add(self, session: Session, corpus_id: str, rows: Sequence[tuple[int, str, Sequence[float]]]) -> None:
        self._index.add(session, corpus_id, [(id, vector, text) for id, text, vector in rows])

    def copy(self, session: Session, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        self._index.copy(session, pairs, corpus_id)

    def remove(self, session: Session, chunk_ids: Sequence[int]) -> None:
        self._index.remove(session, chunk_ids)


@dataclass
class Site:
    """A running service, its parts, and what tests do with them."""

    url: str
    parts: ApiParts
    engine: EchoEngine
    work: Work
    admin_key: str
    rung: list[str]
    clients: list[openai.OpenAI] = field(default_factory=list)
    drain: Drain | None = None

    def client(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.admin_key, **options)
        self.clients.append(client)
        return client

    def http(self, key: str | None = None, **options: Any) -> httpx.Client:
        bearer = f"Bearer {self.admin_key if key is None else key}".encode("latin-1")
        headers = {} if key == "" else {b"authorization": bearer}
        # No certificates: to read the public ones costs more than a request, and this is http.
        return DescribedClient(base_url=self.url, headers=headers, timeout=60, verify=False, **options)

    def ingest(self) -> None:
        """Do all the work that waits, and stand in for the KV worker."""
        self.work.worker().drain()
        self.work.compute_kv()

    @contextmanager
    def ingesting(self) -> Iterator[None]:
        """Work in a thread for as long as the block runs."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(0.05):
                self.ingest()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def corpus_of(self, name: str, files: dict[str, str | bytes], key: str | None = None) -> str:
        """A vector store with these documents, ingested; its id."""
        with self.http(key) as http:
            corpus_id: str = http.post("/v1/vector_stores", json={"name": name}).json()["id"]
            if files:
                sent = [("files", (path, data)) for path, data in files.items()]
                http.post(f"/v1/corpora/{corpus_id}/documents", files=sent).raise_for_status()
        self.ingest()
        return corpus_id

    def key(self, *scopes: str, corpora: list[str] | None = None, by: str | None = None) -> str:
        with self.http(by) as http:
            body = {"name": "test", "scopes": list(scopes), "corpora": corpora}
            made: str = http.post("/v1/api_keys", json=body).json()["key"]
            return made


def make_parts(folder: Path, engine: EchoEngine, rung: list[str], hosts: str = LISTED) -> tuple[ApiParts, Work]:
    url = empty_catalogue(folder / "catalogue.db")
    catalogue, objects, embedder = open_catalogue(url, audit_key(SECRET)), FolderStore(folder / "objects"), WordEmbedder()
    index = open_index(catalogue, embedder)
    index.ensure()
    work = Work(catalogue, objects, IngestSide(index), ParagraphParser())
    rules = folder / "policy.yaml"  # a test that wants one writes it first
    settings = Settings(data_dir=folder, max_upload_bytes=4 << 20, top_k=4)
    policy = PolicyFile(rules if rules.exists() else None)
    parts = ApiParts(
        settings=settings,
        catalogue=catalogue,
        objects=objects,
        kv_store=(kv := KVStore(objects)),
        deleter=work.deleter,
        retriever=Retriever(catalogue, index, embedder),
        embedder=embedder,
        engine=engine,
        done_hash=work.pipeline.done_hash,
        ring=rung.append,
        secret=SECRET,
        placement=(placement := Placement(catalogue, policy, ChainControl(kv.chain, lambda keys: {}))),
        meter=Meter(catalogue, placement.used),
        reach=Reach([str(folder / "sources")], AllowedHosts.parse(hosts), scratch=folder / "scratch"),
    )
    return parts, work


class _Server(uvicorn.Server):
    """Ends when it is told to. (uvicorn looks ten times a second and then waits a tenth of one; most tests have a server.)"""

    _loop: asyncio.AbstractEventLoop
    _told: asyncio.Event

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._told.wait()

    async def startup(self, sockets: Any = None) -> None:
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()
        await super().startup(sockets)

    def stop(self) -> None:
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._told.set)

    def is_quiet(self) -> bool:
        """Takes nobody, and has answered all: what it still does is to sleep."""
        state = self.server_state
        return not (any(each.is_serving() for each in self.servers) or state.connections or state.tasks)


@contextmanager
def running(app: Any, port: int = 0) -> Iterator[str]:
    """The app behind a real server on a port of loopback (0: a free one); its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, lifespan="off", http=PatientProtocol)
    server = _Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.stop()
        while thread.is_alive() and not server.is_quiet():
            time.sleep(0.002)


@contextmanager
def running_site(folder: Path, hosts: str = LISTED) -> Iterator[Site]:
    """`hosts`: where its sources and webhooks may lead."""
    engine, rung = EchoEngine(), []  # type: tuple[EchoEngine, list[str]]
    parts, work = make_parts(folder, engine, rung, hosts)
    key = ensure_admin_key(parts.catalogue, SECRET)
    assert key is not None
    app = build_app(parts)
    with running(app) as url:
        site = Site(url, parts, engine, work, key, rung, drain=app.state.drain)
        yield site
        for client in site.clients:
            client.close()
    parts.catalogue.close()
