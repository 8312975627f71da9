"""`preread bench loads`: time to the first token when stored KV comes slowly, or not at all.

Through the product's engine, cold each time: the prompt's chunks lie in a folder whose reads are held to a bandwidth, shared
by all readers, or never end. Beside each the full prefill of the same prompt, in turns. What matters is the last column: a
source that is slower than computing must save what it can, and one that stalls must cost next to nothing (goal: 1.2).
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.harness import console, load_reader, write_record
from bench.ttft import QUESTION, chunks_for
from precompute.reader import Reader
from serving.engine.torch_engine import TorchEngine
from serving.engine.types import GenerateRequest, Message, Outcome
from storage.folder import FolderStore
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.types import KVRecord, RetrievedChunk

ROUNDS = 3
STALLED = 0.0
PART = 1 << 20


class HeldStore(FolderStore):
    """A folder read at `bytes_per_s` by all readers together; STALLED: reads begin and do not end before `release`."""

    def __init__(self, root: Path, bytes_per_s: float) -> None:
        super().__init__(root)
        self.rate = bytes_per_s
        self._release = threading.Event()
        self._free_at, self._lock = 0.0, threading.Lock()

    def release(self) -> None:
        self._release.set()

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        if self.rate == STALLED:
            self._release.wait(60)
            return 0
        for start in range(0, len(buffer), PART):
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + len(buffer[start : start + PART]) / self.rate
                until = self._free_at
            time.sleep(max(0.0, until - time.monotonic()))
        return super().read_into(name, buffer, offset)


def run(
    *, model: str | None, tokens: int, rates_mb_s: list[float], out: Path | None, workdir: Path, device: str = "cpu",
    dtype: str = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark and print its table; the record is also written to `out`."""
    reader = load_reader(model, device=device, dtype=dtype)
    root = workdir / "loads"
    shutil.rmtree(root, ignore_errors=True)
    chunks = _store(reader, root, tokens)
    reader.frame_kv(), reader.label_kv()  # once in a process, and part of no answer's time
    rows = [_row(reader, root, chunks, rate) for rate in [*rates_mb_s, STALLED]]
    record = {"model": reader.name, "tokens": tokens, "rounds": ROUNDS, "rows": rows}
    _print(record)
    write_record(record, out)
    return record


def _store(reader: Reader, root: Path, tokens: int) -> tuple[RetrievedChunk, ...]:
    store, found = KVStore(FolderStore(root)), []
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


def _row(reader: Reader, root: Path, chunks: tuple[RetrievedChunk, ...], rate: float) -> dict[str, Any]:
    """Medians of a few rounds; the first, in which nothing is known of the source, is reported by itself as well."""
    held = HeldStore(root, rate * 1e6)
    engine = TorchEngine(reader, KVStore(held))
    try:
        pairs = [(_answer(engine, chunks, "full"), _answer(engine, chunks, "default")) for _ in range(ROUNDS)]
    finally:
        held.release()
        engine.close()
    ratios = [ours.report.ms["first_token"] / full.report.ms["first_token"] for full, ours in pairs]
    last = pairs[-1][1].report
    return {
        "mb_s": rate, "full_ttft_s": statistics.median(f.report.ms["first_token"] for f, _ in pairs) / 1000,
        "ttft_s": statistics.median(o.report.ms["first_token"] for _, o in pairs) / 1000,
        "chunks": len(chunks), "chunks_computed": len(last.not_reused), "ratio": statistics.median(ratios),
        "ratio_first": ratios[0], "ratio_worst": max(ratios),
    }  # fmt: skip


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
    for column in ("source", "full s", "default s", "chunks computed", "default / full", "worst"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for row in record["rows"]:
        source = "stalled" if row["mb_s"] == STALLED else f"{row['mb_s']:g} MB/s"
        table.add_row(
            source, f"{row['full_ttft_s']:.3f}", f"{row['ttft_s']:.3f}", f"{row['chunks_computed']} of {row['chunks']}",
            f"{row['ratio']:.2f}", f"{row['ratio_worst']:.2f}",
        )  # fmt: skip
    console().print(table)
