"""`preread bench agent`: a recorded agent's requests, in order, as plain prompts that name no corpus.

The trace's files are ingested by the real pipeline; every request is then looked up, planned and answered as the API does it.
Beside it stands prefix caching in its strongest form: the longest beginning shared with any earlier prompt, of any length of
memory, in blocks of 16 tokens. On both sides only prompts count: what the model answers is not the recorded reply.
Time is this process's CPU time to the first piece of text, which other programs disturb least, against full prefill of the
same prompt right after it. KL is that of the answer's first tokens to full prefill, by the engine's own canary.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.harness import console, emptied, reader_folder, write_record
from bench.ingest import TENANT, Run, upload
from precompute.frame import Turn
from retrieval.known import KnownText
from serving.engine.torch_engine import TorchEngine
from serving.engine.types import GenerateRequest, Message, Report
from serving.parts import Wiring
from serving.settings import Settings
from storage.errors import UserError

BLOCK = 16  # tokens of a prefix cache's block
ANSWER = 9  # tokens of an answer
TRACE = Path(__file__).parent.parent / "samples" / "agent" / "trace.json"
COUNTS = ("prompt", "prefix_cache", "reused", "recomputed", "computed")


def run(
    *, trace: Path, out: Path | None, workdir: Path, model: str | None = None, device: str = "cpu", dtype: str = "bfloat16",
    turns: int = 1000,
) -> dict[str, Any]:  # fmt: skip
    """Replay the first `turns` requests and print the table; the record is also written to `out`."""
    requests, files = read_trace(trace)
    settings = Settings(
        data_dir=emptied(workdir / "agent"), model=str(reader_folder(model)), device=device, dtype=dtype, canary_share=1.0,
        threads=1,
    )  # fmt: skip
    wiring = Wiring(settings, memory_bytes=settings.memory_cache_bytes)
    try:
        job = Run(wiring, upload(wiring, files))
        job.ingest()
        job.compile()
        rows = _replay(wiring, requests[:turns])
    finally:
        wiring.close()
    record = {"trace": trace.name, "model": wiring.reader.name, "total": _total(rows), "rows": rows}
    _print(record)
    write_record(record, out)
    return record


def read_trace(path: Path) -> tuple[list[tuple[str, tuple[Message, ...]]], Path]:
    """Each request's note and messages, and the folder of the files that they hold."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    folder = (path.parent / trace["files"]).resolve()
    said = {name: Message(each["role"], _text(each, folder)) for name, each in trace["messages"].items()}
    return [(each["note"], tuple(said[name] for name in each["send"])) for each in trace["requests"]], folder


def _text(message: Mapping[str, Any], folder: Path) -> str:
    """A message's text, and behind it the file it holds, as it was after the edits of that time."""
    held = (folder / message["file"]).read_text(encoding="utf-8") if "file" in message else ""
    for old, new in message.get("replace", ()):
        if held.count(old) != 1:
            raise UserError(f"the trace replaces {old!r} in {message['file']}, where it does not stand exactly once")
        held = held.replace(old, new)
    return str(message["text"]) + held + str(message.get("after", ""))


def _replay(wiring: Wiring, requests: Sequence[tuple[str, tuple[Message, ...]]]) -> list[dict[str, Any]]:
    known = KnownText(wiring.catalogue, wiring.reader.tokenizer.encode)
    engine = wiring.engine
    if not isinstance(engine, TorchEngine):
        raise UserError("this benchmark measures the torch engine: unset PREREAD_ENGINE")
    earlier: list[np.ndarray] = []
    rows = []
    for number, (note, messages) in enumerate(requests, 1):
        ids = np.array(wiring.reader.format.plain([Turn(m.role, m.content) for m in messages]))
        begun = time.process_time()
        chunks = known.find([m.content for m in messages], tenant_id=TENANT, corpora=None, principals=())
        looked_up = time.process_time() - begun
        request = GenerateRequest(messages, max_tokens=ANSWER, known=chunks, scope="agent")
        kl_before = engine.canary_totals()
        report, seconds = _answer(engine, request)
        kl = _settled(engine, kl_before, report)
        _, full = _answer(engine, GenerateRequest(messages, method="full", max_tokens=ANSWER))
        row = _row(report, kl, len(ids), max((_shared(ids, each) for each in earlier), default=0))
        times = {"cpu_s": seconds + looked_up, "full_cpu_s": full, "look_up_cpu_ms": 1000 * looked_up}
        rows.append({"turn": number, "note": note, **row, **{name: round(value, 4) for name, value in times.items()}})
        earlier.append(ids)
    return rows


def _row(report: Report, kl: float, prompt: int, prefix_cache: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "prefix_cache": prefix_cache, "reused": report.tokens_reused, "recomputed": report.tokens_recomputed,
        "computed": report.tokens_computed, "as_before": report.tokens_prefix, "moved": report.tokens_moved,
        "in_text": sum(each.tokens for each in report.in_text), "kl": round(kl, 6),
    }  # fmt: skip


def _shared(ids: np.ndarray, earlier: np.ndarray) -> int:
    """Tokens in whole blocks that both begin with. The last token of a prompt is always computed, for its logits."""
    most = min(len(ids) - 1, len(earlier))
    differs = np.flatnonzero(ids[:most] != earlier[:most])
    return int(differs[0] if len(differs) else most) // BLOCK * BLOCK


def _answer(engine: TorchEngine, request: GenerateRequest) -> tuple[Report, float]:
    """The report of an answer, and the CPU seconds to its first piece of text."""

    async def answer() -> tuple[Report, float]:
        begun, first = time.process_time(), 0.0
        generation = engine.submit(request)
        async for _ in generation:
            first = first or time.process_time() - begun
        assert generation.outcome is not None
        return generation.outcome.report, first or time.process_time() - begun

    return asyncio.run(answer())


def _settled(engine: TorchEngine, before: tuple[int, float], report: Report) -> float:
    """The KL of the answer that was given last, when it has been compared; 0 for one that was computed in full."""
    if not report.tokens_reused:
        return 0.0
    while engine.canary_totals()[0] == before[0]:
        engine.check()
        time.sleep(0.01)
    return engine.canary_totals()[1] - before[1]


def _total(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {name: sum(row[name] for row in rows) for name in COUNTS}
    taken = [row["kl"] for row in rows if row["reused"]]
    ours, full = (sum(row[name] for row in rows) for name in ("cpu_s", "full_cpu_s"))
    return {
        "turns": len(rows), **total, "reused_share": round(total["reused"] / total["prompt"], 4),
        "prefix_cache_share": round(total["prefix_cache"] / total["prompt"], 4), "cpu_s": round(ours, 3),
        "full_cpu_s": round(full, 3), "full_to_ours": round(full / ours, 2), "kl_mean": round(float(np.mean(taken or [0])), 5),
        "kl_worst": max(taken, default=0.0),
        "look_up_cpu_ms_per_1000": round(1000 * sum(row["look_up_cpu_ms"] for row in rows) / total["prompt"], 3),
    }  # fmt: skip


def _print(record: Mapping[str, Any]) -> None:
    table = Table(title=f"{record['model']}, {record['trace']}: prompt tokens, and where they come from")
    for column in ("turn", "prompt", "prefix cache", "reused", "recomputed", "computed", "full / ours", "KL"):
        table.add_column(column, justify="left" if column == "turn" else "right")
    for row in [*record["rows"], {**record["total"], "turn": "", "note": "all", "kl": record["total"]["kl_mean"]}]:
        counts = [str(row[name]) for name in COUNTS]
        ratio = f"{row['full_cpu_s'] / row['cpu_s']:.1f}"
        table.add_row(f"{row['turn']} {row['note']}", *counts, ratio, f"{row['kl']:.4f}")
    console().print(table)
