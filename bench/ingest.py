"""How fast is ingestion, as a share of the model's own prefill?

The real pipeline (parse, cut, embed, index, compile, store) runs on a folder in this process, with its models
loaded and its parser started. Beside it the plain prefill of the same tokens in ordinary prompts, half
of it before the KV is compiled and half after, so that a busy machine slows both alike; and the encoder alone on the
same texts, of which the pipeline should reach nine tenths.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import select

from bench.harness import emptied, reader_folder, write_record
from bench.overlap import Watch, encoder_seconds
from ingest.attach import attach
from ingest.files import store_file
from ingest.job_view import view
from ingest.jobs import JobItem, create_job
from ingest.sources import FolderSource
from ingest.worker import IngestWorker
from precompute.reader import Reader
from serving.parts import Wiring
from serving.settings import Settings
from storage.catalogue.schema import ChunkRow, Corpus, Job, Tenant
from storage.errors import UserError

TENANT, CORPUS = "bench", "vs_bench"
PROMPT_TOKENS = 1024


def run(
    *,
    path: Path,
    out: Path | None,
    workdir: Path,
    model: str | None = None,
    device: str = "cpu",
    dtype: str = "bfloat16",
    prompt_tokens: int = PROMPT_TOKENS,
) -> dict[str, Any]:
    """Run over the folder twice; the figures, which are also written to `out`."""
    settings = Settings(
        data_dir=emptied(workdir / "ingest"), model=str(reader_folder(model)), device=device, dtype=dtype
    )
    wiring = Wiring(settings)
    try:
        record = _measure(wiring, path, prompt_tokens)
    finally:
        wiring.close()
    write_record(record, out)
    return record


def _measure(wiring: Wiring, path: Path, prompt_tokens: int) -> dict[str, Any]:
    if wiring.reader.full_prefill_reason:
        raise UserError(f"no KV is compiled for this model: {wiring.reader.full_prefill_reason}")
    _warm(wiring)
    files = upload(wiring, path)
    plain = PlainPrefill(wiring.reader, prompt_tokens)
    first = Run(wiring, files)
    first.ingest()
    encoder_s, encoder_cpu_s = encoder_seconds(wiring.catalogue, wiring.embedder)
    tokens = _chunk_tokens(wiring)
    half = len(tokens) // 2
    plain.run(tokens[:half])
    first.compile()
    plain.run(tokens[half:])
    second = Run(wiring, files)
    second.ingest()
    second.compile()
    speed = len(tokens) / (first.ingest_s + first.compile_s)
    return {
        "path": path.name,
        "model": wiring.reader.name,
        "files": len(files),
        "chunks": first.progress["chunks_computed"],
        "tokens": len(tokens),
        "seconds": round(first.ingest_s + first.compile_s, 2),
        "seconds_parse_embed_index": round(first.ingest_s, 2),
        "seconds_compile_store": round(first.compile_s, 2),
        "seconds_encoder_alone": round(encoder_s, 2),
        "fraction_of_encoder": round(encoder_s / first.ingest_s, 3),
        "fraction_of_encoder_cpu": round(encoder_cpu_s / first.ingest_cpu_s, 3),
        "overlap": first.watch.figures(),
        "tokens_per_s": round(speed, 1),
        "model_prefill_tokens_per_s": round(plain.speed, 1),
        "model_prefill_prompt_tokens": prompt_tokens,
        "fraction": round(speed / plain.speed, 3),
        "kv_bytes_written": first.progress["kv_bytes_written"],
        "job_status": first.status,
        "second_run": {
            "seconds": round(second.ingest_s + second.compile_s, 3),
            "files_unchanged": second.progress["files_unchanged"],
            "chunks_computed": second.progress["chunks_computed"],
        },
    }


def _warm(wiring: Wiring) -> None:
    """What a process pays once: the models' first pass, and starting a parser."""
    wiring.reader.prefix_kv()
    wiring.reader.compile([list(wiring.reader.format.frame)])
    wiring.embedder.embed(["warm"])
    wiring.pipeline.parser.parse(b"warm", "warm.txt", lambda: None)
    _ = wiring.index, wiring.kv_queue


@dataclass
class PlainPrefill:
    """The same tokens as ordinary prompts of `length` tokens: what computing them costs anyway."""

    reader: Reader
    length: int
    tokens: int = 0
    seconds: float = 0.0

    @torch.inference_mode()
    def run(self, ids: Sequence[int]) -> None:
        kv = self.reader.buffer(self.length)
        begun = time.perf_counter()
        for start in range(0, len(ids), self.length):
            self.reader.prefill(kv, ids[start : start + self.length])
        self.seconds += time.perf_counter() - begun
        self.tokens += len(ids)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Run:
    """One job over the files, worked on here; its two halves are timed apart."""

    def __init__(self, wiring: Wiring, files: dict[str, tuple[str, str]]) -> None:
        self._wiring = wiring
        with wiring.catalogue.write() as session:
            corpus = session.get_one(Corpus, CORPUS)
            items = []
            for path, (file_id, sha256) in files.items():
                document = attach(session, corpus, path, file_id, sha256)
                items.append(JobItem(path, document.id, file_id))
            job = create_job(session, tenant_id=TENANT, corpus_id=CORPUS, type="ingest", items=items)
            self._job_id = job.id
        self.ingest_s = self.ingest_cpu_s = self.compile_s = 0.0
        self.watch = Watch(wiring.pipeline)

    def ingest(self) -> None:
        w = self._wiring
        worker = IngestWorker(
            w.catalogue, self.watch.pipeline, None, "bench", lambda _: None, w.settings.lease_seconds
        )
        begun, processor = time.perf_counter(), time.process_time()
        worker.drain()
        self.ingest_s, self.ingest_cpu_s = time.perf_counter() - begun, time.process_time() - processor

    def compile(self) -> None:
        begun = time.perf_counter()
        self._wiring.kv_queue.drain()
        self.compile_s = time.perf_counter() - begun

    @property
    def _view(self) -> dict[str, Any]:
        with self._wiring.catalogue.read() as session:
            return view(session, session.get_one(Job, self._job_id))

    @property
    def progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = self._view["progress"]
        return progress

    @property
    def status(self) -> str:
        return str(self._view["status"])


def upload(wiring: Wiring, path: Path) -> dict[str, tuple[str, str]]:
    """The folder's documents as stored files: path -> (file id, sha256)."""
    now = time.time()
    with wiring.catalogue.write() as session:
        session.add(Tenant(id=TENANT, name=TENANT, created_at=now))
        session.flush()
        session.add(
            Corpus(
                id=CORPUS,
                tenant_id=TENANT,
                name=path.name,
                sharing_group=TENANT,
                source=None,
                attributes={},
                created_at=now,
                last_active_at=now,
            )
        )
    source = FolderSource(path)
    stored = {}
    for entry in source.manifest():
        file = store_file(wiring.catalogue, wiring.objects, TENANT, entry.path, source.read(entry.path))
        stored[entry.path] = (file.id, file.sha256)
    if not stored:
        raise UserError(f"{path} holds no document")
    return stored


def _chunk_tokens(wiring: Wiring) -> list[int]:
    """The tokens of all chunks, each distinct chunk once, as they are compiled."""
    with wiring.catalogue.read() as session:
        rows = session.execute(select(ChunkRow.kv_key, ChunkRow.token_ids).order_by(ChunkRow.id)).all()
    distinct = {key: data for key, data in rows if key is not None}
    return [token for data in distinct.values() for token in _unpacked(data)]


def _unpacked(data: bytes) -> Iterator[int]:
    return iter(struct.unpack(f"<{len(data) // 4}I", data))
