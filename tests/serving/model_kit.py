"""A whole service in one process: a reader, the real wiring, a real server on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from api_kit import running
from fixtures_work import empty_catalogue
from sqlalchemy import select

from serving.api.app import build_app
from serving.auth import ensure_admin_key
from serving.parts import Wiring
from serving.settings import Settings
from storage.catalogue.schema import ChunkRow, KVObject

SECRET = "a master secret for tests only, 32 bytes"
LIMIT = "The speed limit for carts inside the harbour is {} knots on every day of the year."


class Shared:
    """What is slow to load and the same in every test: readers and embedders, by dtype."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self._made: dict[str, Wiring] = {}

    def settings(self, folder: Path, **changes: Any) -> Settings:
        # Without blended prompts in memory, so that each answer shows what becomes of its stored KV.
        small = {"threads": 1, "top_k": 4, "blended_cache_bytes": 0}
        base = {"data_dir": folder, "model": str(self.model), "secret": SECRET, **small}
        return Settings(**{**base, **changes})

    def wiring(self, folder: Path, ring: Callable[[str], None], **changes: Any) -> Wiring:
        settings = self.settings(folder, **changes)
        first = self._made.setdefault(settings.dtype, Wiring(settings))
        wiring = Wiring(settings, memory_bytes=64 << 20)
        wiring.__dict__.update(_reader=first.reader, embedder=first.embedder, ring=ring)
        return wiring


class Service:
    """The API of one wiring, and a worker of another, as two processes would have them."""

    def __init__(self, shared: Shared, folder: Path, **changes: Any) -> None:
        empty_catalogue(folder / "catalogue.db")
        self.bell = threading.Event()
        ring = lambda _queue: self.bell.set()  # noqa: E731
        self.wiring = shared.wiring(folder, ring, **changes)
        self.worker = shared.wiring(folder, ring, **changes)
        key = ensure_admin_key(self.wiring.catalogue, self.wiring.secret)
        kept = folder / "admin.key"
        if key is not None:
            kept.write_text(key)
        self.key = kept.read_text()
        self.url = ""
        self.client: openai.OpenAI

    def work(self) -> None:
        """Do what is owed: documents, then their KV. Whatever this leaves behind rings again."""
        self.bell.clear()
        self.worker.ingest_worker.drain()
        self.worker.kv_queue.drain()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Do whatever is rung for while the block runs, and what is left at its end."""
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                if self.bell.wait(0.05):
                    self.work()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.work()

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        headers = {"authorization": f"Bearer {self.key}"}
        answer = httpx.request(method, f"{self.url}/v1{path}", headers=headers, timeout=60, **arguments)
        assert answer.status_code < 400, answer.text
        return answer.json()

    def corpus(self, name: str, files: dict[str, str]) -> str:
        """A vector store with these documents, its KV stored; its id."""
        store: str = self.client.vector_stores.create(name=name).id
        self.upload(store, files)
        return store

    def upload(self, store: str, files: dict[str, str]) -> dict[str, Any]:
        """Put documents there and do the work; the job as it ended."""
        sent = [("files", (path, text.encode())) for path, text in files.items()]
        job = self.call("POST", f"/corpora/{store}/documents", files=sent)
        self.work()
        ended: dict[str, Any] = self.call("GET", f"/jobs/{job['id']}")
        assert ended["status"] == "completed", ended
        return ended

    def chat(self, corpus: str, *messages: str, method: str | None = None, **options: Any) -> Any:
        """An answer to the last message; the ones before it are user and assistant in turn."""
        turns: list[Any] = [
            {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(messages)
        ]
        extra = {"preread": {"method": method}} if method else {}
        return self.client.chat.completions.create(
            model=f"{self.model}@{corpus}", messages=turns, **{"max_tokens": 8, "extra_body": extra, **options}
        )

    @property
    def model(self) -> str:
        return self.wiring.engine.model_id

    def kv_keys(self, word: str) -> list[str]:
        """Keys of the chunks whose text has this word."""
        with self.wiring.catalogue.read() as session:
            query = select(ChunkRow.kv_key).where(ChunkRow.text.contains(word)).order_by(ChunkRow.id)
            return [key for key in session.scalars(query) if key]

    def name_of(self, file_id: str) -> str:
        return self.client.files.retrieve(file_id).filename

    def status(self, key: str) -> str:
        with self.wiring.catalogue.read() as session:
            return session.get_one(KVObject, key).status

    def forget(self) -> None:
        """Empty the API's memory of KV, as a restart would."""
        self.wiring.kv_store.forget(self.wiring.kv_store.keys_in_memory())

    def source_of(self, citation: dict[str, Any]) -> str:
        return self.client.files.content(citation["file_id"]).text


@contextmanager
def serving(shared: Shared, folder: Path, **changes: Any) -> Iterator[Service]:
    """A service over a data folder; the folder outlives it."""
    service = Service(shared, folder, **changes)
    try:
        with running(build_app(service.wiring.api)) as service.url:
            base = f"{service.url}/v1"
            with openai.OpenAI(base_url=base, api_key=service.key, timeout=60, max_retries=0) as service.client:
                yield service
    finally:
        service.wiring.close()
        service.worker.close()


def counted(answer: Any) -> dict[str, Any]:
    """The report of an answer, after checking that its counts add up."""
    report: dict[str, Any] = answer.preread
    parts = report["tokens_reused"] + report["tokens_recomputed"] + report["tokens_computed"]
    assert parts == answer.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == report["tokens_reused"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert report["chunks"] == len(answer.citations)
    return report
