"""What each process is made of: the only place that knows which implementation is used.

Nothing heavy is loaded before it is needed: an idle worker loads no model, and the beat never does.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery import Celery
from sqlalchemy import select

from ingest.deletes import Deleter
from ingest.tasks import INGEST
from precompute.tasks import PRECOMPUTE
from serving.celery_app import broker_url, build_celery, check_broker, ringer
from serving.settings import Settings
from serving.storage_parts import StorageParts
from storage.catalogue.schema import Corpus, Document, KVObject
from storage.conditioning import Reading
from storage.errors import Stopping, UserError
from storage.keys import group_secret, kv_key
from storage.policy.types import Decision
from storage.types import Chunk, KVProfile, ParsedDocument

if TYPE_CHECKING:
    from ingest.pipeline import Pipeline
    from ingest.sources.types import Reach
    from ingest.ticker import Ticker
    from ingest.webhooks import Courier
    from ingest.worker import IngestWorker
    from precompute.queue import KVQueue
    from precompute.reader import Reader
    from precompute.spec import ReaderSpec
    from precompute.types import Compiler
    from retrieval.embedder import SentenceEmbedder
    from retrieval.index import ChunkIndex
    from retrieval.reranker import Reranker
    from serving.api.parts import ApiParts
    from serving.engine.torch_engine import TorchEngine
    from serving.engine.vllm import VLLMEngine
    from serving.engine.vllm_saved import Shelf
    from serving.usage import Meter

PARSERS = 5  # version of what the parsers give: part of what makes a document up to date
PARSER_CHILDREN = 2
BELLS = {"ingest": INGEST, "precompute": PRECOMPUTE}


class Wiring(StorageParts):
    """The parts of one process, each made when it is first asked for, and once."""

    def __init__(self, settings: Settings, *, memory_bytes: int = 0, disk_bytes: int = 0) -> None:
        """`memory_bytes`, `disk_bytes`: for stored KV, in a process that answers questions."""
        super().__init__(settings, memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        self._loading = threading.RLock()
        self.stopping = threading.Event()  # the process has been told to end: what it holds of the queues is handed over

    # --- the operator's policy ---

    def _decide(self, document: Document, corpus: Corpus) -> Decision:
        from serving.placement import decide

        return decide(self.catalogue, self.policy.current(), document, corpus, time.time())

    def stored_as(self, codec: str | None, newest: str, since: float) -> KVProfile | None:
        """See StorageParts."""
        return None if self.spec.full_prefill_reason else self.spec.stored_as(codec)

    @cached_property
    def meter(self) -> Meter:
        from serving.usage import Meter

        return Meter(self.catalogue, self._note_used)

    def _note_used(self, uses: Mapping[str, str]) -> None:
        """An answer used these keys (→ their documents)."""
        self.placement.used(uses)
        if self.parent is not None:
            self.parent.kept.used(uses)

    # --- retrieval ---

    @cached_property
    def embedder(self) -> SentenceEmbedder:
        with self._loading:  # transformers is not to be imported by two threads at once: one of them finds it half made
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

    def restore_basis(self, digest: str) -> bool:
        """Have the basis of a codec whole in the store again: from the parent site, or made again; False where that makes another
        one. Raises StorageUnavailable."""
        from precompute.calibration import remade
        from storage.codecs.shelf import CodecShelf, basis_name
        from storage.codecs.transform import PREFIX, Transform

        if self.parent is not None:
            self.objects.delete(basis_name(digest))
            if isinstance(CodecShelf(self.kv_objects).find(PREFIX + digest), Transform):
                return True
        if self.spec.full_prefill_reason or (basis := remade(self.spec, digest)) is None:
            return False
        self.kv_store.codecs.add(basis)
        return True

    @property
    def spec(self) -> ReaderSpec:
        """The reader, or what is known of it without its weights, where vLLM has them."""
        with self._loading:
            return self._reader if self.settings.engine == "torch" or "_reader" in self.__dict__ else self._spec

    @cached_property
    def _spec(self) -> ReaderSpec:
        from precompute.calibration import use_codec
        from precompute.spec import ReaderSpec

        spec = ReaderSpec(model_folder(self.settings), dtype=self.settings.dtype)
        use_codec(spec, self.settings.stored_codec, self.kv_store.codecs)
        return spec

    def kv_keys(self, batch: Sequence[Reading], group: str, codec: str | None) -> Sequence[str | None]:
        """The keys of readings in a sharing group; None where the model's state is not blended at all."""
        if self.spec.full_prefill_reason:
            return [None] * len(batch)
        secret = self.parent.group_secret(self.secret, group) if self.parent else group_secret(self.secret, group)
        # A window that the model's context has no room for is not read as a window.
        fitting = [read if self.spec.fits(read) else read[-1:] for read in batch]
        profile = self.spec.stored_as(codec)
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
            max_bytes=self.settings.max_upload_bytes,
            decide=self._decide,
            reindexer=Reindexer(self.catalogue, self.embedder, self.ingest_index),
            stopping=self.stopping.is_set,
        )

    def _cut(self, document: ParsedDocument) -> Sequence[Chunk]:
        from ingest.chunker import cut

        return cut(
            document,
            self.spec.tokenizer,
            max_tokens=self.settings.chunk_tokens,
            embedder_tokens=self.embedder.count_batch,
            embedder_limit=self.embedder.max_tokens,
        )

    def _identity(self) -> str:
        """The versions of all that shapes a document's chunks and their KV keys. Which model has embedded them the index knows:
        a reindex leaves documents as done as they were."""
        from ingest.chunker import VERSION

        model = self.spec.full_prefill_reason or repr(self.spec.profile)
        shaping = (
            PARSERS, VERSION, self.spec.tokenizer.fingerprint, model, self.embedder.cutting,
            self.settings.chunk_tokens,
        )  # fmt: skip
        return hashlib.sha256(repr(shaping).encode()).hexdigest()

    @cached_property
    def reach(self) -> Reach:
        from ingest.egress import AllowedHosts
        from ingest.sources.types import Reach

        s = self.settings
        hosts = AllowedHosts.parse(s.allowed_hosts)
        return Reach(s.source_roots.split(":"), hosts, s.data_dir / "credentials", s.data_dir / "scratch")

    @cached_property
    def ingest_worker(self) -> IngestWorker:
        from ingest.planner import SourcePlanner
        from ingest.worker import IngestWorker

        planner = SourcePlanner(self.catalogue, self.objects, self.reach, self.pipeline.done_hash, self.stopping.is_set)
        return IngestWorker(
            self.catalogue, self.pipeline, planner, self.owner, self.ring, self.settings.lease_seconds
        )

    @cached_property
    def ticker(self) -> Ticker:
        from ingest.files import drop_source_files
        from ingest.garbage import Collector
        from ingest.placement import StorePass
        from ingest.ticker import Ticker
        from ingest.versions import Expiry
        from precompute import rows

        def clean(tenant_id: str, file_ids: Sequence[str]) -> None:
            drop_source_files(self.catalogue, self.objects, tenant_id, file_ids)

        collector = Collector(self.catalogue, lambda: self.objects)
        expiry = Expiry(self.catalogue, lambda: self.ingest_index, clean)
        storing = StorePass(self.catalogue, self.policy, self.ring)
        return Ticker(
            self.catalogue, self.ring, self.delete_kv, rows.reap, rows.has_work, collector.tick, storing.tick, expiry.tick
        )

    @cached_property
    def courier(self) -> Courier:
        from ingest.webhooks import Courier

        return Courier(self.catalogue, self.reach.hosts, self.secret)

    @cached_property
    def kv_queue(self) -> KVQueue:
        from precompute.queue import KVQueue
        from precompute.types import nowhere

        def check() -> None:
            if self.stopping.is_set():
                raise Stopping
            queue.check()

        queue = KVQueue(
            self.catalogue,
            self._compiler(check),
            self.owner,
            lease_seconds=self.settings.lease_seconds,
            kv_keys=self.kv_keys,
            settled=self._settle,
            elsewhere=self.parent.elsewhere if self.parent else nowhere,
        )
        return queue

    def _compiler(self, check: Callable[[], None]) -> Compiler:
        """Who compiles: the process that this one's engine computes in. `check`: ends it before its time."""
        if self.settings.engine == "vllm":
            return self._vllm_compiler(check)
        from precompute.compiling import OwnCompiler

        self.reader.check = check
        return OwnCompiler(self.reader, self.kv_store)

    def _vllm_compiler(self, check: Callable[[], None]) -> Compiler:
        spec = self.spec  # see `embedder`
        from serving.engine.vllm_compiler import VLLMCompiler

        return VLLMCompiler(
            spec, self.settings.vllm_url, self._shelf, secret=self.secret, check=check, token=os.environ.get("VLLM_API_KEY", "")
        )

    @cached_property
    def _shelf(self) -> Shelf:
        """What vLLM has written, as it lies in the store itself: whatever this site's lease says of using it."""
        from serving.engine.vllm_saved import Shelf
        from storage.kvstore import KVStore
        from storage.tiers.store import object_name

        return Shelf(KVStore(self.kv_objects), lambda key: self.kv_objects.size(object_name(key)))

    def _settle(self, job_ids: set[str]) -> None:
        from ingest.jobs import settle

        for job_id in sorted(job_ids):
            with self.catalogue.write() as session:
                settle(session, job_id)

    # --- the API ---

    @cached_property
    def engine(self) -> TorchEngine | VLLMEngine:
        engine = self._vllm_engine() if self.settings.engine == "vllm" else self._torch_engine()
        self._closers.append(engine.close)
        return engine

    def _vllm_engine(self) -> VLLMEngine:
        from serving.engine.vllm import VLLMEngine
        from serving.engine.vllm_labels import Labels

        return VLLMEngine(
            self.spec, self.settings.vllm_url, secret=self.secret, owners=self._owners,
            max_requests=self.settings.max_requests, token=os.environ.get("VLLM_API_KEY", ""),
            labels=None if self.spec.full_prefill_reason else Labels(self.spec, self.catalogue, self._shelf, secret=self.secret),
        )  # fmt: skip

    def _owners(self, keys: Sequence[str]) -> frozenset[tuple[str, str]]:
        with self.catalogue.read() as session:
            found = select(KVObject.tenant_id, KVObject.sharing_group).where(KVObject.key.in_(keys)).distinct()
            return frozenset((tenant, group) for tenant, group in session.execute(found))

    def _torch_engine(self) -> TorchEngine:
        from serving.engine.torch_engine import TorchEngine

        return TorchEngine(
            self.reader,
            self.kv_store,
            max_requests=self.settings.max_requests,
            on_miss=self.missed,
            blended_bytes=self.settings.blended_cache_bytes,
            canary_share=self.settings.canary_share,
        )

    @cached_property
    def api(self) -> ApiParts:
        from retrieval.known import KnownText
        from retrieval.search import Retriever
        from serving.api.parts import ApiParts
        from serving.limits import Limiter
        from serving.login import Login
        from serving.oidc_file import read_oidc

        oidc = self.settings.oidc_file
        reader = self.spec
        return ApiParts(
            settings=self.settings,
            catalogue=self.catalogue,
            objects=self.objects,
            kv_store=self.kv_store,
            deleter=self.deleter,
            retriever=Retriever(self.catalogue, self.index, self.embedder, self.reranker),
            embedder=self.embedder,
            reranker=self.reranker,
            known=None if reader.full_prefill_reason else KnownText(self.catalogue, reader.tokenizer.encode),
            engine=self.engine,
            done_hash=lambda *what: self.pipeline.done_hash(*what),
            ring=self.ring,
            secret=self.secret,
            check_broker=check_broker(self.celery),
            check_engine=self.engine.check,
            placement=self.placement,
            meter=self.meter,
            reach=self.reach,
            limiter=Limiter(lambda: broker_url(self.settings)),
            login=Login(self.catalogue, self.secret, read_oidc(Path(oidc))) if oidc else None,
            parent=self.parent,
        )


class _Swapped:
    """The index with rows as ingest writes them: id, text, vector."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self.remove, self.copy, self.lacking = index.remove, index.copy, index.lacking

    def add(self, session: Any, corpus_id: str, rows: Any) -> None:
        self._index.add(session, corpus_id, _swapped(rows))

    def stage(self, session: Any, corpus_id: str, rows: Any) -> None:
        self._index.stage(session, corpus_id, _swapped(rows))

    def flip(self, session: Any, corpus_id: str) -> bool:
        return self._index.generations.flip(session, corpus_id, self._index)

    def clear(self, session: Any, corpus_id: str, most: int) -> int:
        return self._index.generations.clear(session, corpus_id, self._index, most)


def _swapped(rows: Any) -> list[Any]:
    return [(number, vector, text) for number, text, vector in rows]


def model_folder(settings: Settings) -> Path:
    """The reader model's folder; the embedded one is converted into the user's cache on first use."""
    if settings.model != "embedded":
        folder = Path(settings.model)
        if not (folder / "config.json").exists():
            raise UserError(f"PREREAD_MODEL={settings.model}: no model folder (config.json is missing)")
        return folder
    from precompute.embedded import embedded_model

    return embedded_model()
