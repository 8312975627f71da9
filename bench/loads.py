"""`preread bench loads`: time to the first token when stored KV comes slowly, or not at all.

Through the product's engine, cold each time: the prompt's chunks lie in a folder, and in S3 where PREREAD_OBJECT_STORE names one,
behind a narrow way (`narrow.py`) of a bandwidth that all readers share, or that lets nothing through. Beside each the full
prefill of the same prompt, in turns. What matters are the last columns: a source that is slower than computing must save
what it can, and one that stalls must cost next to nothing (goal: 1.2), of which the wait is told apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from bench.harness import console, emptied, load_reader, write_record
from bench.narrow import STALLED, Gate, HeldStore, NarrowWire
from bench.ttft import QUESTION, chunks_for
from precompute.reader import Reader
from serving.engine.torch_engine import TorchEngine
from serving.engine.types import GenerateRequest, Message, Outcome, Report
from serving.settings import Settings, load_settings
from storage.folder import FolderStore
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.objects import open_store
from storage.types import KVRecord, ObjectStore, RetrievedChunk

ROUNDS = 3


class Source(Protocol):
    """Where objects are stored, and read through a narrow way."""

    name: str

    def wide(self) -> ObjectStore: ...

    def narrow(self, bytes_per_s: float) -> contextlib.AbstractContextManager[ObjectStore]: ...


class _Folder:
    name = "folder"

    def __init__(self, root: Path) -> None:
        self._root = str(emptied(root))

    def wide(self) -> ObjectStore:
        return FolderStore(self._root)

    @contextlib.contextmanager
    def narrow(self, bytes_per_s: float) -> Iterator[ObjectStore]:
        gate = Gate(bytes_per_s)
        try:
            yield HeldStore(self._root, gate)
        finally:
            gate.open()


class _S3:
    """A folder of its own in the bucket of PREREAD_OBJECT_STORE."""

    name = "S3"

    def __init__(self, settings: Settings) -> None:
        place, mark, encryption = settings.objects.partition("?")
        self._settings, self._url = settings, f"{place.rstrip('/')}/bench-{uuid.uuid4().hex}{mark}{encryption}"

    def wide(self) -> ObjectStore:
        return self._open(self._settings.s3_endpoint)

    @contextlib.contextmanager
    def narrow(self, bytes_per_s: float) -> Iterator[ObjectStore]:
        gate = Gate(math.inf)
        with NarrowWire(self._settings.s3_endpoint, gate) as wire:
            store = self._open(wire.url)  # which asks for the bucket
            gate.rate = bytes_per_s
            yield store

    def _open(self, endpoint: str) -> ObjectStore:
        given = self._settings
        return open_store(
            self._url, s3_endpoint=endpoint, s3_access_key=given.s3_access_key, s3_secret_key=given.s3_secret_key,
            s3_region=given.s3_region,
        )  # fmt: skip


def run(
    *, model: str | None, tokens: int, rates_mb_s: list[float], out: Path | None, workdir: Path, device: str = "cpu",
    dtype: str = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark and print its table; the record is also written to `out`. Raises UserError."""
    settings = load_settings()
    reader = load_reader(model, device=device, dtype=dtype)
    sources: list[Source] = [_Folder(workdir / "loads")]
    if settings.objects.startswith("s3://"):
        sources.append(_S3(settings))
    reader.frame_kv(), reader.label_kv()  # once in a process, and part of no answer's time
    rows = []
    for source in sources:
        store = source.wide()
        chunks = _store(reader, store, tokens)
        try:
            rows += [_row(reader, source, chunks, rate) for rate in [*rates_mb_s, STALLED]]
        finally:
            store.delete_many(list(store.list("kv/")))
    record = {"model": reader.name, "tokens": tokens, "rounds": ROUNDS, "rows": rows}
    _print(record)
    write_record(record, out)
    return record


def _store(reader: Reader, objects: ObjectStore, tokens: int) -> tuple[RetrievedChunk, ...]:
    store, found = KVStore(objects), []
    for number, ids in enumerate(map(tuple, chunks_for(reader, tokens))):
        key = kv_key(reader.profile, ids, "bench", b"bench")
        store.put(KVRecord(key, reader.profile, ids, reader.compile([ids])[0]))
        found.append(_chunk(number, ids, key))
    return tuple(found)


def _chunk(number: int, ids: tuple[int, ...], key: str) -> RetrievedChunk:
    return RetrievedChunk(
        chunk_id=number, document_id="d", corpus_id="c", file_id="f", path="p", version="v", text="", token_ids=ids,
        start=0, end=0, headings=(), page_start=None, page_end=None, line_start=1, line_end=1, score=1.0, kv_key=key,
    )  # fmt: skip


def _row(reader: Reader, source: Source, chunks: tuple[RetrievedChunk, ...], rate: float) -> dict[str, Any]:
    """Medians of a few rounds; the first, in which nothing is known of the source, is reported by itself as well."""
    with source.narrow(rate * 1e6) as objects:
        engine = TorchEngine(reader, KVStore(objects))
        try:
            pairs = [(_answer(engine, chunks, "full"), _answer(engine, chunks, "default")) for _ in range(ROUNDS)]
        finally:
            engine.close()
    full, ours = ([each.report.ms for each in side] for side in zip(*pairs, strict=True))
    reports = [answer.report for _, answer in pairs]
    ratios = [b["first_token"] / a["first_token"] for a, b in zip(full, ours, strict=True)]
    waits = [b["fetch"] / a["first_token"] for a, b in zip(full, ours, strict=True)]
    return {
        "source": source.name, "mb_s": rate, "full_ttft_s": statistics.median(a["first_token"] for a in full) / 1000,
        "ttft_s": statistics.median(b["first_token"] for b in ours) / 1000,
        "chunks": len(chunks), "chunks_computed": len(reports[-1].not_reused), "reasons": sorted(_reasons(reports)),
        "ratio": statistics.median(ratios), "ratio_first": ratios[0], "ratio_worst": max(ratios), "waits": waits,
        "prefill_tokens_per_s": reader.prefill_tokens_per_s,
    }  # fmt: skip


def _reasons(reports: list[Report]) -> set[str]:
    return {chunk.reason for report in reports for chunk in report.not_reused}


def _answer(engine: TorchEngine, chunks: tuple[RetrievedChunk, ...], method: str) -> Outcome:
    async def answer() -> Outcome:
        generation = engine.submit(GenerateRequest((Message("user", QUESTION),), chunks, method=method, max_tokens=1))
        async for _ in generation:
            pass
        assert generation.outcome is not None
        return generation.outcome

    return asyncio.run(answer())


def _print(record: dict[str, Any]) -> None:
    table = Table(title=f"{record['model']}, {record['tokens']} prompt tokens, stored KV held to a bandwidth")
    for column in ("source", "full s", "default s", "chunks computed", "default / full", "worst", "of which waited"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for row in record["rows"]:
        speed = "stalled" if row["mb_s"] == STALLED else f"{row['mb_s']:g} MB/s"
        table.add_row(
            f"{row['source']}, {speed}", f"{row['full_ttft_s']:.3f}", f"{row['ttft_s']:.3f}",
            f"{row['chunks_computed']} of {row['chunks']}", f"{row['ratio']:.2f}", f"{row['ratio_worst']:.2f}",
            f"{max(row['waits']):.2f}",
        )  # fmt: skip
    console().print(table)
