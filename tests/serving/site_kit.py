"""A parent as a running API, and children of it with a catalogue, a folder and a clock of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from api_kit import Site
from fixtures_work import Work, make_work, paragraphs
from sqlalchemy import select

from ingest.site_sync import SiteSync
from storage.catalogue.kept import Kept
from storage.catalogue.schema import ChunkRow, Corpus, Document, KVObject, SiteLink
from storage.format import encode
from storage.kvstore import KVStore
from storage.peer import PeerStore
from storage.readthrough import ReadThrough
from storage.site_key import SiteKey
from storage.types import KVProfile, KVRecord, ObjectStore

LEASE, EXCHANGE = 30.0, 5.0
FILES: dict[str, str | bytes] = {"a.txt": paragraphs(3, tag="a"), "b.txt": paragraphs(2, tag="b")}
PROFILE = KVProfile(
    model="tiny", weights="w", tokenizer="t", frame="f", conditioning="none", codec="raw", dtype="float32",
    layers=1, kv_heads=1, head_dim=4,
)  # fmt: skip


def record(key: str) -> KVRecord:
    """Some KV under this key."""
    return KVRecord(key, PROFILE, (1, 2, 3), torch.arange(24, dtype=torch.float32).view(1, 2, 1, 3, 4))


def object_name(key: str) -> str:
    return f"kv/{key[:2]}/{key}"


def store_kv(site: Site) -> None:
    """Stand in for the parent's KV worker: every row's object is stored."""
    with site.parts.catalogue.write() as session:
        for row in session.scalars(select(KVObject).where(KVObject.status.in_(("pending", "done")))):
            row.status, row.bytes = "done", site.parts.objects.put(object_name(row.key), encode(record(row.key)))


def parent_corpus(site: Site, name: str, files: dict[str, str | bytes]) -> str:
    """A corpus at the parent with its KV stored; its id."""
    corpus = site.corpus_of(name, files)
    store_kv(site)
    return corpus


def keys_of(work: Work, corpus_id: str | None = None, path: str | None = None) -> list[str]:
    query = select(ChunkRow.kv_key).join(Document, Document.id == ChunkRow.document_id).order_by(ChunkRow.id)
    if corpus_id is not None:
        query = query.where(ChunkRow.corpus_id == corpus_id)
    if path is not None:
        query = query.where(Document.path == path)
    with work.catalogue.read() as session:
        return [key for key in session.scalars(query) if key is not None]


@dataclass
class Clock:
    now: float = 500.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Child:
    """What a child has: the same documents, and of KV only what it fetched."""

    work: Work
    key: SiteKey
    peer: PeerStore
    store: KVStore
    objects: ReadThrough
    clock: Clock
    sync: SiteSync
    local: ObjectStore
    kept: Kept
    forgotten: list[str] = field(default_factory=list)

    def ingest(self, files: dict[str, str | bytes], name: str = "c") -> Corpus:
        corpus = self.work.corpus(name, tenant="default")
        self.work.ingest(corpus, files)
        self.mark_stored()
        return corpus

    def mark_stored(self) -> None:
        """Stand in for the child's KV worker, which has asked the parent."""
        with self.work.catalogue.write() as session:
            for row in session.scalars(select(KVObject).where(KVObject.status == "pending")):
                row.status, row.bytes = "done", sum(map(len, encode(record(row.key))))

    def read(self, key: str) -> Any:
        return self.store.get(key, PROFILE)

    def here(self) -> set[str]:
        return {name.rpartition("/")[2] for name in self.local.list("kv/")}

    def rows(self) -> dict[str, str]:
        with self.work.catalogue.read() as session:
            return {row.key: row.status for row in session.scalars(select(KVObject))}

    def link(self) -> SiteLink:
        with self.work.catalogue.read() as session:
            return session.get_one(SiteLink, self.key.site_id)


def register(site: Site, name: str = "edge", corpora: list[str] | None = None) -> SiteKey:
    with site.http() as http:
        made = http.post("/v1/sites", json={"name": name, "corpora": corpora})
    assert made.status_code == 200, made.text
    return SiteKey.parse(made.json()["key"])


@contextmanager
def child_of(
    site: Site, folder: Path, key: SiteKey, url: str = "", budget: Callable[[], int | None] = lambda: None
) -> Iterator[Child]:
    """`url`: the way to the parent, if it is not the parent's own; `budget`: bytes of the parent's objects that it keeps."""
    folder.mkdir(exist_ok=True)
    work, clock = make_work(folder), Clock()
    peer = PeerStore(url or site.url, key, read_s=5)

    def needed(key: str) -> bool:
        with work.catalogue.read() as session:
            row = session.get(KVObject, key)
        return row is not None and row.status != "purge"

    def evict(keys: Sequence[str]) -> list[str]:
        return [name.rpartition("/")[2] for name in work.objects.delete_many([object_name(key) for key in keys])]

    kept = Kept(work.catalogue, budget, evict)
    objects = ReadThrough(work.objects, peer, needed, kept)
    store = KVStore(objects, 0)
    sync = SiteSync(work.catalogue, peer, key, store.delete, objects.pull, LEASE, EXCHANGE, clock)
    yield Child(work, key, peer, store, objects, clock, sync, work.objects, kept)
    peer.close()
    work.catalogue.close()


def settle(child: Child) -> None:
    """Exchange until in step."""
    for _ in range(5):
        if child.sync.step():
            return
    raise AssertionError("never in step")


@contextmanager
def child_in_step(site: Site, corpus: str, folder: Path) -> Iterator[Child]:
    """A child with the documents of `corpus`, which are FILES, in step, that has fetched all their KV."""
    with child_of(site, folder, register(site)) as made:
        made.ingest(FILES)
        settle(made)
        assert set(keys_of(made.work)) == set(keys_of(site.work, corpus)), "the same text has the same keys at both"
        for key in keys_of(made.work):
            assert isinstance(made.read(key), KVRecord)
        yield made


def ask(
    site: Site, key: SiteKey, method: str, name: str, *, query: str | None = None, now: float | None = None, **how: Any
) -> httpx.Response:
    """A signed request for an object, or with another query than its own."""
    query = query if query is not None else key.query(method, name, site.parts.clock() if now is None else now)
    with site.http("") as http:
        return http.request(method, f"/site/{key.site_id}/objects/{name}?{query}", **how)


def call(site: Site, key: SiteKey, name: str, body: Any, signed_as: Any = None) -> httpx.Response:
    """A signed call with this body; `signed_as`: what the signature says the body is."""
    content = json.dumps(body).encode()
    signed = content if signed_as is None else json.dumps(signed_as).encode()
    with site.http("") as http:
        return http.post(f"/site/{key.site_id}/{name}?{key.query('POST', name, site.parts.clock(), signed)}", content=content)
