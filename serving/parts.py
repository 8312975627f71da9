"""What each process is made of: the only place that knows which implementation is used.

Nothing heavy is loaded before it is needed: an idle worker loads no model, and the beat never does.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from celery import Celery
from sqlalchemy import select

from ingest.deletes import Deleter
from ingest.tasks import INGEST
from precompute.tasks import PRECOMPUTE
from serving.celery_app import build_celery, check_broker, ringer
from serving.settings import Settings, master_secret
from storage.catalogue.engine import Catalogue, migrate, open_catalogue
from storage.catalogue.facts import codecs_of
from storage.catalogue.schema import Corpus, Document, KVObject
from storage.conditioning import Reading
from storage.errors import FileError, StorageUnavailable, UserError
from storage.keys import group_secret, kv_key
from storage.kvstore import KVStore
from storage.objects import open_store
from storage.policy.file import PolicyFile
from storage.policy.types import Decision
from storage.tier_control import ChainControl, TierControl
from storage.tiers.disk import DiskTier, empty_abandoned
from storage.types import Chunk, KVProfile, Miss, ObjectStore, ParsedDocument, TextEmbedder, under

if TYPE_CHECKING:
    from ingest.pipeline import Pipeline
    from ingest.site_sync import SiteSync
    from ingest.ticker import Ticker
    from ingest.worker import IngestWorker
    from precompute.queue import KVQueue
    from precompute.reader import Reader
    from retrieval.index import ChunkIndex
    from retrieval.reranker import Reranker
    from serving.api.parts import ApiParts
    from serving.engine.torch_engine import TorchEngine
    from serving.parent_site import ParentSite
    from serving.placement import Placement
    from serving.usage import Meter

log = structlog.get_logger(__name__)
PARSERS = 1  # version of what the parsers give: part of what makes a document up to date
PARSER_CHILDREN = 2
DEVICE_SHARE = 10  # one part in so many of an accelerator's memory is for stored KV
FORGET_BATCH = 5000  # of the keys on disk are compared with the catalogue in one tick
BELLS = {"ingest": INGEST, "precompute": PRECOMPUTE}


class Wiring:
    """The parts of one process, each made when it is first asked for, and once."""

    def __init__(self, settings: Settings, *, memory_bytes: int = 0, disk_bytes: int = 0) -> None:
        """`memory_bytes`, `disk_bytes`: for stored KV, in a process that answers questions."""
        self.settings = settings
        self.owner = f"{socket.gethostname()[:20]}-{os.getpid()}"
        self._memory_bytes, self._disk_bytes = memory_bytes, disk_bytes
        self._disk_keys: list[str] = []  # still to be compared with the catalogue
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
        store = open_store(
            s.objects,
            s3_endpoint=s.s3_endpoint or None,
            s3_access_key=s.s3_access_key or None,
            s3_secret_key=s.s3_secret_key or None,
            s3_region=s.s3_region,
        )
        return self._sealed(store) if s.encryption_keys else store

    def _sealed(self, store: ObjectStore) -> ObjectStore:
        from storage.sealed import SealedStore

        words = [word.strip() for word in self.settings.encryption_keys.split(",")]
        return SealedStore(store, [self.secret if w == "master" else w.encode() for w in words], self._owner)

    def _owner(self, name: str) -> str:
        """Whose an object is: a file's tenant, which its name tells, or a chunk's sharing group, which its row tells."""
        room, _, rest = name.partition("/")
        if room != "kv":
            return rest.partition("/")[0]
        with self.catalogue.read() as session:
            return session.scalar(select(KVObject.sharing_group).where(KVObject.key == rest.rpartition("/")[2])) or ""

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
        parent = self.parent
        options: dict[str, Any] = {
            "device": self.settings.device, "device_bytes": self._device_bytes(), "disk": self._disk_tier(),
        }  # fmt: skip
        if parent is None:
            return KVStore(self.objects, self._memory_bytes, on_damage=lambda key, _: self.repair(key), **options)
        from storage.lease import LeasedKVStore

        return LeasedKVStore(
            parent.objects, self._memory_bytes, on_damage=self._damaged_copy, lease=parent.lease, **options
        )

    def _damaged_copy(self, key: str, miss: Miss) -> None:
        """The parent's object takes its place, or if it has none, one that is computed here."""
        if self.parent is not None:
            self.parent.objects.drop(key)
        self.repair(key)

    def _device_bytes(self) -> int:
        """A part of an accelerator's memory; on a CPU, host memory is the device's."""
        if not self._memory_bytes or not self.settings.device.startswith("cuda"):
            return 0
        import torch

        return torch.cuda.get_device_properties(self.settings.device).total_memory // DEVICE_SHARE

    def _disk_tier(self) -> DiskTier | None:
        folder = self.settings.data_dir / "cache"
        if not self.settings.disk_cache:
            empty_abandoned(folder)  # from when the setting was another
        if not self._disk_bytes:
            return None
        try:
            disk = DiskTier(folder, self._disk_bytes)
        except StorageUnavailable as error:
            log.warning("no disk tier", error=str(error))
            return None
        self._closers.append(disk.close)
        return disk

    # --- the operator's policy ---

    @cached_property
    def policy(self) -> PolicyFile:
        return PolicyFile(Path(self.settings.policy_file) if self.settings.policy_file else None)

    def _decide(self, document: Document, corpus: Corpus) -> Decision:
        from serving.placement import decide

        return decide(self.catalogue, self.policy.current(), document, corpus, time.time())

    @cached_property
    def tiers(self) -> TierControl:
        return ChainControl(self.kv_store.chain, self._by_profile)

    def _by_profile(self, keys: Collection[str]) -> dict[KVProfile, list[str]]:
        """Keys by the profile under which their records are read; none where the model is not blended."""
        if self.reader.full_prefill_reason:
            return {}
        with self.catalogue.read() as session:
            codecs = codecs_of(session, keys)
        found: dict[KVProfile, list[str]] = {}
        for key in keys:
            found.setdefault(under(self.reader.profile, codecs.get(key)), []).append(key)
        return found

    @cached_property
    def placement(self) -> Placement:
        from serving.placement import Placement

        return Placement(self.catalogue, self.policy, self.tiers)

    @cached_property
    def meter(self) -> Meter:
        from serving.usage import Meter

        return Meter(self.catalogue, self.placement.used)

    # --- deletion and repair ---

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
        if not lease.held():
            self._forget(self._held())  # also what an answer under way is about to keep
        return min(self.settings.tick_seconds, max(lease.left(), 0.01)) if lease.held() else self.settings.tick_seconds

    def forget_deleted(self) -> int:
        """Drop from this process's memory and disk what any process has deleted from the catalogue; how many records.

        Of what lies on disk, a part is looked at each time."""
        self.kv_store.chain.reclaim()
        self._disk_keys = self._disk_keys or self.kv_store.chain.keys("disk")
        held = {*self._held(), *self._disk_keys[:FORGET_BATCH]}
        del self._disk_keys[:FORGET_BATCH]
        gone = set(held)
        with self.catalogue.read() as session:
            for keys in (list(held)[start : start + 500] for start in range(0, len(held), 500)):
                kept = select(KVObject.key).where(KVObject.key.in_(keys), KVObject.status != "purge")
                gone -= set(session.scalars(kept))
        if gone:
            self._forget(gone)
        return len(gone)

    # --- retrieval ---

    @cached_property
    def embedder(self) -> TextEmbedder:
        from retrieval.embedder import SentenceEmbedder

        return SentenceEmbedder(self.settings.embedder, device=self.settings.device, dtype=self.settings.dtype)

    @cached_property
    def reranker(self) -> Reranker | None:
        from retrieval.reranker import CrossEncoderReranker

        s = self.settings
        return CrossEncoderReranker(s.reranker, device=s.device, dtype=s.dtype) if s.reranker else None

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

        from precompute.calibration import use_codec
        from precompute.gate import check_model
        from precompute.reader import Reader

        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        folder = model_folder(self.settings)
        reader = Reader(folder, device=self.settings.device, dtype=self.settings.dtype)
        check_model(reader)
        use_codec(reader, self.settings.stored_codec, self.kv_store.codecs)
        return reader

    def kv_keys(self, batch: Sequence[Reading], group: str, codec: str | None) -> Sequence[str | None]:
        """The keys of readings in a sharing group; None where the model's state is not blended at all."""
        if self.reader.full_prefill_reason:
            return [None] * len(batch)
        secret = self.parent.group_secret(self.secret, group) if self.parent else group_secret(self.secret, group)
        # A window that the model's context has no room for is not read as a window.
        fitting = [read if self.reader.fits(read) else read[-1:] for read in batch]
        profile = under(self.reader.profile, codec)
        return [kv_key(profile, read[-1], group, secret, read[:-1]) for read in fitting]

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
        from ingest.reindex import Reindexer

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
            decide=self._decide,
            reindexer=Reindexer(self.catalogue, self.embedder, self.ingest_index),
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
        from ingest.garbage import Collector
        from ingest.placement import StorePass
        from ingest.ticker import Ticker
        from precompute import rows

        collector = Collector(self.catalogue, lambda: self.objects)
        storing = StorePass(self.catalogue, self.policy, self.ring)
        return Ticker(
            self.catalogue, self.ring, self.delete_kv, rows.reap, rows.has_work, collector.tick, storing.tick
        )

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
        if status == "over_quota":
            return status
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
            retriever=Retriever(self.catalogue, self.index, self.embedder, self.reranker),
            embedder=self.embedder,
            reranker=self.reranker,
            engine=self.engine,
            done_hash=lambda *what: self.pipeline.done_hash(*what),
            ring=self.ring,
            secret=self.secret,
            check_broker=check_broker(self.celery),
            check_engine=self.engine.check,
            placement=self.placement,
            meter=self.meter,
            parent=self.parent,
        )


class _Swapped:
    """The index with rows as ingest writes them: id, text, vector."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self.remove, self.lacking = index.remove, index.lacking

    def add(self, session: Any, corpus_id: str, rows: Any) -> None:
        try:
            self._index.add(session, corpus_id, _swapped(rows))
        except UserError as error:  # the corpus waits for a reindex
            raise FileError(str(error), code="embedding_failed") from error

    def stage(self, session: Any, corpus_id: str, rows: Any) -> None:
        self._index.stage(session, corpus_id, _swapped(rows))

    def flip(self, session: Any, corpus_id: str) -> bool:
        return self._index.generations.flip(session, corpus_id, self._index)


def _swapped(rows: Any) -> list[Any]:
    return [(number, vector, text) for number, text, vector in rows]


def model_folder(settings: Settings) -> Path:
    """The reader model's folder; the embedded one is converted into the data folder on first use."""
    if settings.model != "embedded":
        folder = Path(settings.model)
        if not (folder / "config.json").exists():
            raise UserError(f"PREREAD_MODEL={settings.model}: no model folder (config.json is missing)")
        return folder
    from precompute.embedded import embedded_model

    return embedded_model(settings.data_dir / "models")
