"""What each process is made of: the only place that knows which implementation is used.

Nothing heavy is loaded before it is needed: an idle worker loads no model, and the beat never does.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery import Celery
from sqlalchemy import select

from ingest.deletes import Deleter
from ingest.tasks import INGEST
from precompute.tasks import PRECOMPUTE
from serving.celery_app import build_celery, check_broker, ringer
from serving.settings import Settings, master_secret
from storage.catalogue.engine import Catalogue, migrate, open_catalogue
from storage.catalogue.schema import KVObject
from storage.conditioning import Reading
from storage.errors import UserError
from storage.keys import group_secret, kv_key
from storage.kvstore import KVStore
from storage.objects import open_store
from storage.types import Chunk, Miss, ObjectStore, ParsedDocument, TextEmbedder

if TYPE_CHECKING:
    from ingest.pipeline import Pipeline
    from ingest.site_sync import SiteSync
    from ingest.ticker import Ticker
    from ingest.worker import IngestWorker
    from precompute.queue import KVQueue
    from precompute.reader import Reader
    from retrieval.index import ChunkIndex
    from serving.api.parts import ApiParts
    from serving.engine.torch_engine import TorchEngine
    from serving.parent_site import ParentSite

PARSERS = 1  # version of what the parsers give: part of what makes a document up to date
PARSER_CHILDREN = 2
BELLS = {"ingest": INGEST, "precompute": PRECOMPUTE}


class Wiring:
    """The parts of one process, each made when it is first asked for, and once."""

    def __init__(self, settings: Settings, *, memory_bytes: int = 0) -> None:
        self.settings = settings
        self.owner = f"{socket.gethostname()[:20]}-{os.getpid()}"
        self._memory_bytes = memory_bytes
        self._loading = threading.RLock()
        self._closers: list[Callable[[], None]] = []

    def close(self) -> None:
        """End what was started: parser children, the engine, connections."""
        while self._closers:
            self._closers.pop()()

    # --- storage ---

    @cached_property
    def secret(self) -> bytes:
        return master_secret(self.settings)

    @cached_property
    def catalogue(self) -> Catalogue:
        migrate(self.settings.database)
        catalogue = open_catalogue(self.settings.database)
        self._closers.append(catalogue.close)
        return catalogue

    @cached_property
    def objects(self) -> ObjectStore:
        s = self.settings
        return open_store(
            s.objects,
            s3_endpoint=s.s3_endpoint or None,
            s3_access_key=s.s3_access_key or None,
            s3_secret_key=s.s3_secret_key or None,
            s3_region=s.s3_region,
        )

    @cached_property
    def parent(self) -> ParentSite | None:
        """The parent site, if this one has any."""
        if not self.settings.parent_url:
            return None
        from serving.parent_site import ParentSite

        parent = ParentSite(self.settings, self.catalogue, self.objects, self._is_needed)
        self._closers.append(parent.peer.close)
        return parent

    @cached_property
    def site_sync(self) -> SiteSync:
        if self.parent is None:
            raise UserError("this site has no parent: PREREAD_PARENT_URL is not set")
        return self.parent.sync(self.delete_kv)

    def _is_needed(self, key: str) -> bool:
        with self.catalogue.read() as session:
            return session.scalar(select(KVObject.status).where(KVObject.key == key)) not in (None, "purge")

    @cached_property
    def kv_store(self) -> KVStore:
        if self.parent is None:
            return KVStore(self.objects, self._memory_bytes, on_damage=lambda key, _: self.repair(key))
        from storage.lease import LeasedKVStore

        return LeasedKVStore(
            self.parent.objects, self._memory_bytes, on_damage=self._damaged_copy, lease=self.parent.lease
        )

    def _damaged_copy(self, key: str, miss: Miss) -> None:
        """The parent's object takes its place, or if it has none, one that is computed here."""
        if self.parent is not None:
            self.parent.objects.drop(key)
        self.repair(key)

    def delete_kv(self, keys: Sequence[str]) -> None:
        self.kv_store.delete(keys)
        self._forget(keys)

    def _forget(self, keys: Collection[str]) -> None:
        """From all memory of this process, without making an engine where there is none."""
        self.kv_store.forget(keys)
        if (engine := self.__dict__.get("engine")) is not None:
            engine.forget(keys)

    def repair(self, key: str) -> None:
        """Have a stored object computed again that was found damaged or absent."""
        from precompute.rows import request_repair

        with self.catalogue.write() as session:
            owed = request_repair(session, key)
        if owed:
            self.ring("precompute")

    def _held(self) -> set[str]:
        """The keys of all stored KV in this process's memory."""
        held = set(self.kv_store.keys_in_memory())
        if (engine := self.__dict__.get("engine")) is not None:
            held |= engine.keys_in_memory()
        return held

    def stay_in_step(self) -> float:
        """Forget what was deleted, and look whether stored KV may be used; the seconds after which to look again."""
        if self.parent is None:
            self.forget_deleted()
            return self.settings.tick_seconds
        lease = self.parent.lease
        lease.look(self.parent.exchanges, self.forget_deleted)
        if not lease.held() and (held := self._held()):
            self._forget(held)
        return min(self.settings.tick_seconds, max(lease.left(), 0.01)) if lease.held() else self.settings.tick_seconds

    def forget_deleted(self) -> int:
        """Drop from this process's memory what any process has deleted from the catalogue; how many records."""
        held = self._held()
        if not held:
            return 0
        kept = select(KVObject.key).where(KVObject.key.in_(held), KVObject.status != "purge")
        with self.catalogue.read() as session:
            gone = held - set(session.scalars(kept))
        if gone:
            self._forget(gone)
        return len(gone)

    # --- retrieval ---

    @cached_property
    def embedder(self) -> TextEmbedder:
        from retrieval.embedder import SentenceEmbedder

        return SentenceEmbedder(self.settings.embedder, device=self.settings.device)

    @cached_property
    def index(self) -> ChunkIndex:
        from retrieval.index import open_index

        index = open_index(self.catalogue, self.embedder)
        index.ensure()
        return index

    # --- the reader ---

    @property
    def reader(self) -> Reader:
        """The reader model, loaded once per process."""
        with self._loading:
            return self._reader

    @cached_property
    def _reader(self) -> Reader:
        import torch

        from precompute.gate import check_model
        from precompute.reader import Reader

        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        folder = model_folder(self.settings)
        reader = Reader(folder, device=self.settings.device, dtype=self.settings.dtype)
        check_model(reader)
        return reader

    def kv_keys(self, batch: Sequence[Reading], group: str) -> Sequence[str | None]:
        """The keys of readings in a sharing group; None where the model's state is not blended at all."""
        if self.reader.full_prefill_reason:
            return [None] * len(batch)
        secret = self.parent.group_secret(self.secret, group) if self.parent else group_secret(self.secret, group)
        # A window that the model's context has no room for is not read as a window.
        fitting = [read if self.reader.fits(read) else read[-1:] for read in batch]
        return [kv_key(self.reader.profile, read[-1], group, secret, read[:-1]) for read in fitting]

    # --- bells ---

    @cached_property
    def celery(self) -> Celery:
        app = build_celery(self.settings)
        self._closers.append(app.close)
        return app

    @cached_property
    def ring(self) -> Callable[[str], None]:
        return ringer(self.celery, BELLS)

    # --- ingest ---

    @property
    def ingest_index(self) -> Any:
        return _Swapped(self.index)

    @cached_property
    def deleter(self) -> Deleter:
        return Deleter(self.catalogue, self.objects, self.ingest_index, self.delete_kv)

    @cached_property
    def pipeline(self) -> Pipeline:
        from ingest.isolate import ParserPool
        from ingest.pipeline import Pipeline

        parsers = ParserPool(PARSER_CHILDREN)
        self._closers.append(parsers.close)
        return Pipeline(
            catalogue=self.catalogue,
            objects=self.objects,
            parser=parsers,
            cut=self._cut,
            embedder=self.embedder,
            index=self.ingest_index,
            kv_keys=self.kv_keys,
            kv_delete=self.delete_kv,
            identity=self._identity(),
            lease_seconds=self.settings.lease_seconds,
        )

    def _cut(self, document: ParsedDocument) -> Sequence[Chunk]:
        from ingest.chunker import cut

        return cut(
            document,
            self.reader.tokenizer,
            max_tokens=self.settings.chunk_tokens,
            embedder_tokens=self.embedder.count_tokens,
            embedder_limit=self.embedder.max_tokens,
        )

    def _identity(self) -> str:
        """The versions of all that shapes a document's chunks and their KV keys."""
        from ingest.chunker import VERSION

        model = self.reader.full_prefill_reason or repr(self.reader.profile)
        shaping = (
            PARSERS, VERSION, self.reader.tokenizer.fingerprint, model, self.embedder.identity,
            self.settings.chunk_tokens,
        )  # fmt: skip
        return hashlib.sha256(repr(shaping).encode()).hexdigest()

    @cached_property
    def ingest_worker(self) -> IngestWorker:
        from ingest.planner import SourcePlanner
        from ingest.worker import IngestWorker

        roots = self.settings.source_roots.split(":")
        planner = SourcePlanner(self.catalogue, self.objects, roots, self.pipeline.done_hash)
        return IngestWorker(
            self.catalogue, self.pipeline, planner, self.owner, self.ring, self.settings.lease_seconds
        )

    @cached_property
    def ticker(self) -> Ticker:
        from ingest.ticker import Ticker
        from precompute import rows

        return Ticker(self.catalogue, self.ring, self.delete_kv, rows.reap, rows.has_work)

    @cached_property
    def kv_queue(self) -> KVQueue:
        from precompute.queue import KVQueue
        from precompute.types import nowhere

        return KVQueue(
            self.catalogue,
            self.kv_store,
            self.reader,
            self.owner,
            lease_seconds=self.settings.lease_seconds,
            kv_keys=self.kv_keys,
            settled=self._settle,
            elsewhere=self.parent.elsewhere if self.parent else nowhere,
        )

    def _settle(self, job_ids: set[str]) -> None:
        from ingest.jobs import settle

        for job_id in sorted(job_ids):
            with self.catalogue.write() as session:
                settle(session, job_id)

    # --- the API ---

    def missed(self, key: str, miss: Miss) -> str:
        """Why a chunk's KV was not used, as the answer reports it; what ought to be stored is owed again."""
        if miss is not Miss.ABSENT:
            return str(miss)
        with self.catalogue.read() as session:
            status = session.scalar(select(KVObject.status).where(KVObject.key == key))
        if status in ("pending", "leased"):
            return "pending"
        if status == "done":
            self.repair(key)
        return str(miss)

    @cached_property
    def engine(self) -> TorchEngine:
        from serving.engine.torch_engine import TorchEngine

        engine = TorchEngine(
            self.reader,
            self.kv_store,
            max_requests=self.settings.max_requests,
            on_miss=self.missed,
            blended_bytes=self.settings.blended_cache_bytes,
            canary_share=self.settings.canary_share,
        )
        self._closers.append(engine.close)
        return engine

    @cached_property
    def api(self) -> ApiParts:
        from retrieval.search import Retriever
        from serving.api.parts import ApiParts

        return ApiParts(
            settings=self.settings,
            catalogue=self.catalogue,
            objects=self.objects,
            kv_store=self.kv_store,
            deleter=self.deleter,
            retriever=Retriever(self.catalogue, self.index, self.embedder),
            embedder=self.embedder,
            engine=self.engine,
            done_hash=lambda *what: self.pipeline.done_hash(*what),
            ring=self.ring,
            secret=self.secret,
            check_broker=check_broker(self.celery),
            check_engine=self.engine.check,
            parent=self.parent,
        )


class _Swapped:
    """The index with rows as ingest writes them: id, text, vector."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self.remove = index.remove

    def add(self, session: Any, corpus_id: str, rows: Any) -> None:
        self._index.add(session, corpus_id, [(number, vector, text) for number, text, vector in rows])


def model_folder(settings: Settings) -> Path:
    """The reader model's folder; the embedded one is converted into the data folder on first use."""
    if settings.model != "embedded":
        folder = Path(settings.model)
        if not (folder / "config.json").exists():
            raise UserError(f"PREREAD_MODEL={settings.model}: no model folder (config.json is missing)")
        return folder
    from precompute.embedded import embedded_model

    return embedded_model(settings.data_dir / "models")
