"""Are the planner's formulae true of a real model? Its object's size, and prefill time over length beside FLOPs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.harness import console, emptied, load_reader, write_record
from precompute.reader import Reader
from serving.plan import SPEED_AT, object_payload, prefill_flops, prefill_seconds, shape_of
from storage.errors import UserError
from storage.folder import FolderStore
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.types import KVRecord

ROUNDS = 5
OBJECT_TOKENS = 400
TOLERANCE = 0.25  # by which a measured ratio of times may differ from that of the FLOPs


def run(
    *, model: str | None, tokens: list[int], out: Path | None, workdir: Path, device: str, dtype: str
) -> dict[str, Any]:
    """Print a table and write a record: by length the best time of ROUNDS and what the formula says of it."""
    reader = load_reader(model, device=device, dtype=dtype)
    if max(tokens) > reader.max_positions:
        raise UserError(f"{reader.name} takes {reader.max_positions} tokens at most")
    shape = shape_of(str(reader.folder))
    lengths = sorted({SPEED_AT, *tokens})
    seconds = _measure(reader, lengths)
    speed = SPEED_AT / seconds[SPEED_AT]
    rows = [
        {
            "tokens": n, "seconds": seconds[n], "flops": prefill_flops(shape, n),
            "predicted_s": prefill_seconds(shape, n, speed), "off": prefill_seconds(shape, n, speed) / seconds[n] - 1,
        }
        for n in lengths
    ]  # fmt: skip
    stored, payload = _stored(reader, workdir), object_payload(shape, OBJECT_TOKENS)
    record: dict[str, Any] = {
        "model": reader.name, "rounds": ROUNDS, "tolerance": TOLERANCE, "rows": rows,
        "within_tolerance": all(abs(float(row["off"])) <= TOLERANCE for row in rows),
        "tokens_per_s_at": {"tokens": SPEED_AT, "tokens_per_s": speed},
        "object": {"tokens": OBJECT_TOKENS, "bytes": stored, "formula_bytes": payload, "header_bytes": stored - payload},
    }  # fmt: skip
    _print(record)
    write_record(record, out)
    return record


def _measure(reader: Reader, lengths: list[int]) -> dict[int, float]:
    """The best of ROUNDS by length, in turns, so that a slow moment of the machine meets all lengths. On a CPU its processor
    time, in which other programs take no part."""
    clock = time.perf_counter if reader.device.type == "cuda" else time.process_time
    generator = torch.Generator().manual_seed(0)
    best = dict.fromkeys(lengths, float("inf"))
    for _ in range(ROUNDS):
        for length in lengths:
            ids = torch.randint(10, 400, (length,), generator=generator).tolist()
            kv = reader.buffer(length)
            begun = clock()
            with torch.inference_mode():
                reader.prefill(kv, ids)
            if reader.device.type == "cuda":
                torch.cuda.synchronize()
            best[length] = min(best[length], clock() - begun)
    return best


def _stored(reader: Reader, workdir: Path) -> int:
    """Bytes of a stored chunk."""
    folder = emptied(workdir / "plan")
    ids = tuple(range(10, 10 + OBJECT_TOKENS))
    [kv] = reader.compile([ids])
    key = kv_key(reader.profile, ids, "bench", b"bench")
    return KVStore(FolderStore(folder)).put(KVRecord(key, reader.profile, ids, kv.cpu()))


def _print(record: dict[str, Any]) -> None:
    table = Table(title=f"prefill beside its FLOPs, {record['model']}, best of {record['rounds']}")
    for column in ("tokens", "seconds", "GFLOP", "predicted s", "off"):
        table.add_column(column, justify="right")
    for row in record["rows"]:
        table.add_row(
            str(row["tokens"]), f"{row['seconds']:.3f}", f"{row['flops'] / 1e9:.0f}", f"{row['predicted_s']:.3f}",
            f"{row['off']:+.0%}",
        )
    console().print(table)
    held = record["object"]
    console().print(
        f"a stored chunk of {held['tokens']} tokens: {held['bytes']} bytes, by the formula {held['formula_bytes']} "
        f"and a header of {held['header_bytes']}"
    )
