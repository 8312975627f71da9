"""`preread bench ttft --engine vllm`: time to the first token in vLLM, blended beside its own full prefill.

Both go through one vLLM process and one engine, in turn within each round, each round with another question, so that neither
finds the blocks of a round before in vLLM's prefix cache. Seconds are those of the wall; CPU seconds, of all of vLLM's processes,
say more on a machine that others use too.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.harness import console, write_record
from bench.vllm_site import Answered, VLLMSite, vllm_site

ROUNDS = 5


def run(
    *, model: str | None, tokens: Sequence[int], methods: Sequence[str], out: Path | None, workdir: Path, vllm: Path,
    device: str = "cpu", dtype: str = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark and print its table; the record is also written to `out`."""
    with vllm_site(model, workdir, vllm, tokens, device=device, dtype=dtype) as site:
        rows = [row for length in tokens for row in measure(site, length, methods, ROUNDS)]
        record = {
            "benchmark": "ttft", "engine": "vllm", "model": site.engine.model_id, "dtype": dtype, "rounds": ROUNDS, "rows": rows,
        }  # fmt: skip
    _print(record)
    write_record(record, out)
    return record


def measure(site: VLLMSite, length: int, methods: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """One row for each method. A round before the first one warms kernels and reads objects from disk."""
    asked: dict[str, list[Answered]] = defaultdict(list)
    for number in range(rounds + 1):
        for method in methods if number % 2 == 0 else tuple(reversed(methods)):
            answered = asyncio.run(site.ask(site.request(length, method, number)))
            if number:
                asked[method].append(answered)
    return [_row(length, method, asked[method]) for method in methods]


def _row(length: int, method: str, asked: Sequence[Answered]) -> dict[str, Any]:
    report = asked[-1].outcome.report
    return {
        "tokens": asked[-1].outcome.prompt_tokens, "about": length, "method": method,
        "ttft_s": statistics.median(each.ttft_s for each in asked), "ttft_s_all": [each.ttft_s for each in asked],
        "cpu_s": statistics.median(each.cpu_s for each in asked), "cpu_s_all": [each.cpu_s for each in asked],
        "reused": report.tokens_reused, "recomputed": report.tokens_recomputed, "computed": report.tokens_computed,
    }  # fmt: skip


def _print(record: dict[str, Any]) -> None:
    table = Table(title=f"vLLM: time to first token, {record['model']}, {record['dtype']}, median of {record['rounds']}")
    for column in ("tokens", "method", "ttft s", "cpu s", "reused", "recomputed", "full / this", "cpu full / this"):
        table.add_column(column, justify="left" if column == "method" else "right")
    full = {row["about"]: row for row in record["rows"] if row["method"] == "full"}
    for row in record["rows"]:
        ratios = [
            f"{full[row['about']][name] / row[name]:.1f}x" if row["about"] in full and row[name] else "-"
            for name in ("ttft_s", "cpu_s")
        ]
        table.add_row(
            str(row["tokens"]), row["method"], f"{row['ttft_s']:.3f}", f"{row['cpu_s']:.2f}", str(row["reused"]),
            str(row["recomputed"]), *ratios,
        )  # fmt: skip
    console().print(table)
