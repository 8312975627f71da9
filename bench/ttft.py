"""`preread bench ttft`: time to the first token by prompt length, method and where the stored KV lies.

Every row is the median of a few rounds; within a round all methods and sources take turns, so that a change of the
machine's speed meets them alike. The time runs from token ids and keys to the logits of the first answer token; what
comes from disk or S3 is fetched anew each time, and no object is kept in the process.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.harness import console, drive, emptied, grounded, load_reader, store_by, write_record
from precompute.frame import Turn
from precompute.reader import Reader
from precompute.spec import ReaderSpec, filler_passages
from serving.blend.assembly import Segment, assemble
from serving.blend.methods import parse_method
from serving.settings import codec_for
from storage.errors import UserError
from storage.folder import FolderStore
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.objects import open_store
from storage.types import KVRecord, ObjectStore

CHUNK_TOKENS = 400
ROUNDS = 3
QUESTION = "How much is charged for a season ticket, and who repairs a device that failed?"
DEADLINE_S = 600.0


class Prompt:
    """A prompt of about `tokens` tokens whose chunks are stored in every source, by the product's codec or another."""

    def __init__(self, reader: Reader, stores: dict[str, KVStore], tokens: int, codec: str) -> None:
        store_by(reader, codec, list(stores.values()))
        self.reader, self.stores, self.profile = reader, stores, reader.profile
        self.chunks = chunks_for(reader, tokens)
        reader.frame_kv(), reader.label_kv()
        self.keys = [kv_key(reader.profile, tuple(ids), "bench", b"bench") for ids in self.chunks]
        for at in range(0, len(self.chunks), 8):
            for ids, kv in zip(self.chunks[at : at + 8], reader.compile(self.chunks[at : at + 8]), strict=True):
                key = kv_key(reader.profile, tuple(ids), "bench", b"bench")
                for store in stores.values():
                    store.put(KVRecord(key, reader.profile, tuple(ids), kv))

    def ids(self) -> tuple[list[int], int]:
        """The whole prompt, and how many of its tokens stand before the question."""
        segments = grounded(self.reader, self.chunks, [None] * len(self.chunks), QUESTION)
        ids = [i for s in segments for i in s.ids]
        return ids, len(ids) - len(segments[-1].ids)

    def first_token(self, method: str, source: str) -> tuple[float, float]:
        """(seconds to the first token, share of token-layers recomputed)."""
        begun = time.perf_counter()
        chosen = parse_method(method)
        records: dict[str, Any] = {}
        if chosen.uses_stored:
            records = self.stores[source].get_many(self.keys, self.profile, DEADLINE_S)
        kv: list[torch.Tensor | None] = [None] * len(self.keys)
        for at, key in enumerate(self.keys if chosen.uses_stored else ()):
            if not isinstance(found := records.get(key), KVRecord):
                raise UserError(f"a stored chunk could not be read from {source}: {found}")
            kv[at] = found.kv
        segments = grounded(self.reader, self.chunks, kv, QUESTION)
        if not chosen.uses_stored:
            segments = [Segment("tail", tuple(i for s in segments for i in s.ids))]
        assembly = assemble(self.reader, segments, 1, stored_labels=chosen.stored_labels)
        int(drive(chosen.blend(self.reader, assembly)).argmax())
        seconds = time.perf_counter() - begun
        stored_layers = sum(b - a for a, b in assembly.spans) * self.reader.layers
        return seconds, assembly.recomputed_token_layers / stored_layers if stored_layers else 0.0


def chunks_for(reader: ReaderSpec, tokens: int) -> list[list[int]]:
    """Different chunks of CHUNK_TOKENS tokens, so many that the whole prompt has about `tokens`."""
    room = tokens - len(reader.format.frame) - len(reader.format.tail([Turn("user", QUESTION)]))
    label = len(reader.format.label(10))
    count = max(1, round(room / (CHUNK_TOKENS + label)))
    size = room // count - label
    if size < 1:
        raise UserError(f"{tokens} tokens are too few: the frame and the question need {tokens - room}")
    text = reader.tokenizer.encode(" ".join(filler_passages()))
    stream = text * (2 + (size + 1) * count // len(text))
    # Each chunk starts one token further on, so that no two are alike.
    return [stream[(size + 1) * i : (size + 1) * i + size] for i in range(count)]


def run(
    *, model: str | None, tokens: Sequence[int], methods: Sequence[str] = ("full", "default"), out: Path | None,
    workdir: Path, device: str = "cpu", dtype: str = "bfloat16", codecs: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark and print its table; the record is also written to `out`."""
    reader = load_reader(model, device=device, dtype=dtype)
    emptied(workdir / "ttft")
    stores, note = _stores(workdir)
    rows: list[dict[str, Any]] = []
    for length in tokens:
        rows += _length(reader, stores, length, methods, codecs)
    record: dict[str, Any] = {"model": reader.name, "rounds": ROUNDS, "rows": rows}
    if note:
        record["s3"] = note
    _print(record)
    write_record(record, out)
    return record


def _length(
    reader: Reader, stores: dict[str, KVStore], length: int, methods: Sequence[str], codecs: Sequence[str]
) -> list[dict[str, Any]]:
    if length + 1 > reader.max_positions:
        raise UserError(f"{reader.name} takes {reader.max_positions} tokens at most, so {length} cannot be measured")
    by_source = {source: codecs or [codec_for("s3://" if source == "s3" else "")] for source in stores}
    names = dict.fromkeys(codec for chosen in by_source.values() for codec in chosen)
    prompts = {codec: Prompt(reader, stores, length, codec) for codec in names}
    cases = []
    for method in methods:
        if parse_method(method).uses_stored:
            cases += [(method, source, codec) for source in stores for codec in by_source[source]]
        else:
            cases.append((method, "memory", next(iter(names))))
    seconds: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    shares: dict[tuple[str, str, str], float] = {}
    for _ in range(ROUNDS):
        for case in cases:
            took, shares[case] = prompts[case[2]].first_token(*case[:2])
            seconds[case].append(took)
    return [
        {
            "tokens": length, "method": method, "source": source, "codec": codec, "recomputed": shares[method, source, codec],
            "ttft_s": statistics.median(seconds[method, source, codec]), "ttft_s_all": seconds[method, source, codec],
        }
        for method, source, codec in cases
    ]  # fmt: skip


def _stores(workdir: Path) -> tuple[dict[str, KVStore], str]:
    """Where stored KV lies, by source; S3 as the PREREAD_S3_* settings say."""
    disk: ObjectStore = FolderStore(workdir / "ttft")
    stores = {"memory": KVStore(FolderStore(workdir / "ttft-memory"), memory_bytes=64 << 30), "disk": KVStore(disk)}
    endpoint = os.environ.get("PREREAD_S3_ENDPOINT")
    if not endpoint:
        return stores, "not measured: PREREAD_S3_ENDPOINT is not set"
    url = os.environ.get("PREREAD_OBJECT_STORE", "s3://preread-bench/ttft")
    keys: dict[str, Any] = {name: os.environ.get(f"PREREAD_{name.upper()}") for name in ("s3_access_key", "s3_secret_key")}
    stores["s3"] = KVStore(open_store(url, s3_endpoint=endpoint, **keys))
    return stores, ""


def _print(record: dict[str, Any]) -> None:
    table = Table(title=f"time to first token, {record['model']}, median of {record['rounds']}")
    for column in ("tokens", "method", "source", "codec", "ttft s", "recomputed", "full / this"):
        table.add_column(column, justify="left" if column in ("method", "source", "codec") else "right")
    full = {r["tokens"]: r["ttft_s"] for r in record["rows"] if r["method"] == "full"}
    for row in record["rows"]:
        ratio = f"{full[row['tokens']] / row['ttft_s']:.1f}x" if row["tokens"] in full else "-"
        table.add_row(
            str(row["tokens"]), row["method"], row["source"], row["codec"], f"{row['ttft_s']:.3f}",
            f"{row['recomputed']:.1%}", ratio,
        )  # fmt: skip
    console().print(table)
    if "s3" in record:
        console().print(f"s3 {record['s3']}")
