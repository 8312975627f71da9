"""A small whole: catalogue, store, index and pipeline, for tests of jobs, syncs, schedules and deletions."""

from __future__ import annotations

import io
import math
import re
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, update

from ingest.attach import attach
from ingest.chunker import cut
from ingest.deletes import Deleter
from ingest.files import store_file
from ingest.job_view import view
from ingest.jobs import ACTIVE, JobItem, create_job, settle
from ingest.pipeline import Pipeline
from ingest.worker import IngestWorker
from retrieval.index import open_index
from serving.placement import decide
from storage.catalogue.engine import Catalogue, migrate, open_catalogue
from storage.catalogue.schema import ChunkRow, Corpus, Document, Job, KVObject, Tenant
from storage.errors import FileError
from storage.folder import FolderStore
from storage.keys import token_bytes
from storage.policy.rules import Policy
from storage.types import Block, Chunk, ParsedDocument


def zipped_texts(**files: str) -> bytes:
    """A zip of `NAME.txt` for each."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"{name}.txt", text)
    return data.getvalue()


class WordTokenizer:
    """One token per word with the blanks before it."""

    def encode(self, text: str) -> list[int]:
        return [zlib.crc32(piece.encode()) for piece in re.findall(r"\s*\S+|\s+$", text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def count_batch(self, texts: Sequence[str]) -> list[int]:
        return [len(self.encode(text)) for text in texts]


class WordEmbedder:
    """Unit vectors made of the letters of a text; refuses a batch in which a text says POISON."""

    identity = "letters"
    dimensions = 8
    max_tokens = 512

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        if any("POISON" in text for text in texts):
            raise ValueError("poison")
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        counts = [1.0 + sum(1 for c in text if ord(c) % 8 == i) for i in range(8)]
        length = math.sqrt(sum(c * c for c in counts))
        return [c / length for c in counts]


class HeldEmbedder(WordEmbedder):
    """Does nothing until its gate is open; `batches` are the texts that it was given, call by call."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.batches: list[list[str]] = []

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        self.begun.set()
        self.gate.wait(60)
        self.batches.append(list(texts))
        return super().embed(texts)


class ParagraphParser:
    """One block per paragraph. `parsed` counts the calls; a text may ask for an error, or for any
    accident."""

    def __init__(self) -> None:
        self.parsed: list[str] = []
        self.accident: Callable[[str], None] = lambda name: None

    def parse(self, data: bytes, name: str, check: Callable[[], None] = lambda: None) -> ParsedDocument:
        self.parsed.append(name)
        self.accident(name)
        text = data.decode()
        if text.startswith("ERROR "):
            raise FileError("as asked", code=text.split()[1])
        spans = [(m.start(), m.end()) for m in re.finditer(r"[^\n]+(?:\n[^\n]+)*", text)]
        return ParsedDocument(text=text, blocks=tuple(Block("paragraph", a, b) for a, b in spans))


def key_of(token_ids: tuple[int, ...], group: str, before: Sequence[tuple[int, ...]] = ()) -> str:
    import hashlib

    fields = [group.encode(), *map(token_bytes, before), token_bytes(token_ids)]
    return hashlib.sha256(b"\0".join(fields)).hexdigest()


@dataclass
class Work:
    """The parts, and short names for what tests do with them."""

    catalogue: Catalogue
    objects: Any
    index: Any
    parser: ParagraphParser
    max_tokens: int = 20
    lease_seconds: float = 5.0
    max_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        self.deleted: list[str] = []
        self.rung: list[str] = []
        self.policy = Policy()

    def delete_kv(self, keys: Sequence[str]) -> Collection[str]:
        self.deleted += keys
        return ()

    def cut(self, parsed: ParsedDocument) -> Sequence[Chunk]:
        return cut(parsed, WordTokenizer(), max_tokens=self.max_tokens)

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(
            catalogue=self.catalogue,
            objects=self.objects,
            parser=self.parser,
            cut=self.cut,
            embedder=WordEmbedder(),
            index=self.index,
            kv_keys=lambda batch, group, codec: [key_of(tuple(read[-1]), group + (codec or ""), read[:-1]) for read in batch],
            kv_delete=self.delete_kv,
            identity=f"test-{self.max_tokens}",
            lease_seconds=self.lease_seconds,
            max_bytes=self.max_bytes,
            decide=lambda document, corpus: decide(self.catalogue, self.policy, document, corpus, time.time()),
        )

    @property
    def deleter(self) -> Deleter:
        return Deleter(self.catalogue, self.objects, self.index, self.delete_kv)

    def worker(self, owner: str = "w1", planner: Any = None) -> IngestWorker:
        return IngestWorker(
            self.catalogue, self.pipeline, planner, owner, self.rung.append, self.lease_seconds
        )

    def corpus(self, name: str = "c", tenant: str = "t1", **values: Any) -> Corpus:
        with self.catalogue.write() as session:
            if session.get(Tenant, tenant) is None:
                session.add(Tenant(id=tenant, name=tenant, created_at=time.time()))
                session.flush()
            corpus = Corpus(
                id=f"vs_{tenant}_{name}", tenant_id=tenant, name=name, sharing_group=tenant, attributes={},
                created_at=time.time(), last_active_at=time.time(), **values,
            )  # fmt: skip
            session.add(corpus)
            session.flush()
        return corpus

    def upload(self, corpus: Corpus, files: dict[str, str | bytes]) -> str:
        """Queue an ingest job over these files, by path; its id."""
        stored = {}
        for path, text in files.items():
            data = text if isinstance(text, bytes) else text.encode()
            stored[path] = store_file(self.catalogue, self.objects, corpus.tenant_id, path, data)
        with self.catalogue.write() as session:
            own = session.get_one(Corpus, corpus.id)
            items = []
            for path, file in stored.items():
                document = attach(session, own, path, file.id, file.sha256)
                items.append(JobItem(path, document.id, file.id))
            job = create_job(
                session, tenant_id=corpus.tenant_id, corpus_id=corpus.id, type="ingest", items=items
            )
            return job.id

    def ingest(self, corpus: Corpus, files: dict[str, str | bytes]) -> str:
        """Upload, and work until nothing is left to do but the KV."""
        job_id = self.upload(corpus, files)
        self.worker().drain()
        return job_id

    def compute_kv(self, job_id: str | None = None) -> int:
        """Stand in for the KV worker: everything pending is done, ten bytes each."""
        with self.catalogue.write() as session:
            query = update(KVObject).where(KVObject.status == "pending")
            done: Any = session.execute(query.values(status="done", bytes=10))
            settle_all(session)
            return int(done.rowcount)

    def view(self, job_id: str) -> dict[str, Any]:
        with self.catalogue.read() as session:
            return view(session, session.get_one(Job, job_id))

    def chunks(self, corpus: Corpus | None = None, path: str | None = None) -> list[str]:
        query = select(ChunkRow.text).join(Document, Document.id == ChunkRow.document_id)
        if corpus is not None:
            query = query.where(ChunkRow.corpus_id == corpus.id)
        if path is not None:
            query = query.where(Document.path == path)
        with self.catalogue.read() as session:
            return list(session.scalars(query.order_by(Document.path, ChunkRow.ordinal)))

    def search(self, corpus: Corpus, query: str) -> tuple[list[str], list[str]]:
        """Texts found by meaning and by words."""
        with self.catalogue.read() as session:
            dense = self.index.real.dense(session, [corpus.id], WordEmbedder().embed([query])[0], 50)
            lexical = self.index.real.lexical(session, [corpus.id], query, 50)
            texts = dict(session.execute(select(ChunkRow.id, ChunkRow.text)).all())
        return [texts[number] for number, _ in dense], [texts[number] for number, _ in lexical]

    def document(self, corpus: Corpus, path: str) -> Document | None:
        with self.catalogue.read() as session:
            query = select(Document).where(Document.corpus_id == corpus.id, Document.path == path)
            return session.scalars(query).first()

    def count(self, table: Any, *where: Any) -> int:
        with self.catalogue.read() as session:
            return session.scalar(select(func.count()).select_from(table).where(*where)) or 0


class Index:
    """The real index, with rows as ingest writes them."""

    def __init__(self, catalogue: Catalogue, embedder: WordEmbedder | None = None) -> None:
        self.real = open_index(catalogue, embedder or WordEmbedder())
        self.real.ensure()

    def add(self, session: Any, corpus_id: str, rows: Sequence[tuple[int, str, Sequence[float]]]) -> None:
        self.real.add(session, corpus_id, [(number, vector, text) for number, text, vector in rows])

    def remove(self, session: Any, chunk_ids: Sequence[int]) -> None:
        self.real.remove(session, chunk_ids)

    def copy(self, session: Any, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        self.real.copy(session, pairs, corpus_id)


@cache
def _empty_catalogue() -> bytes:
    """A migrated database: copied, which is quicker than to migrate one per test."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.db"
        migrate(f"sqlite:///{path}")
        return path.read_bytes()


def empty_catalogue(path: Path) -> str:
    """Such a database at this path, where none is yet; its URL."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_empty_catalogue())
    return f"sqlite:///{path}"


def make_work(folder: Path) -> Work:
    return open_work(folder, empty_catalogue(folder / "catalogue.db"))


def open_work(folder: Path, url: str | None = None) -> Work:
    """The same whole as another process has it."""
    catalogue = open_catalogue(url or f"sqlite:///{folder / 'catalogue.db'}")
    return Work(catalogue, FolderStore(folder / "objects"), Index(catalogue), ParagraphParser())


def settle_all(session: Any) -> int:
    """Settle every job that has not ended; how many ended now."""
    ids = session.scalars(select(Job.id).where(Job.status.in_(ACTIVE))).all()
    return sum(settle(session, job_id) for job_id in ids)


def paragraphs(count: int, words: int = 12, tag: str = "p") -> str:
    """A text of `count` paragraphs that become one chunk each."""
    return "\n\n".join(" ".join(f"{tag}{i}w{j}" for j in range(words)) for i in range(count))
