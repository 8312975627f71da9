"""`preread bench serve`: the real service under open-loop load, method beside method, at rising rates."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.harness import console, write_record
from bench.live_service import Service, running_service, started_service
from bench.open_loop import Asked, offer, schedule, summary
from storage.errors import UserError

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
ROUNDS = 2  # of each rate, the methods in turn
MOST = 5000  # requests of one benchmark
SHARES = ("p50", "p95", "p99")


def run(
    *, rates: list[float], methods: list[str], seconds: float, ttft_limit: float, answer_tokens: int, url: str | None,
    key: str | None, out: Path | None, workdir: Path, model: str | None = None, seed: int = 0, vllm: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Offer `rates` requests a second of each method, `seconds` at a time; print a table, return the record. `vllm`: an
    environment with vLLM, which is the engine then; `full` is vLLM with its own prefix cache."""
    if not rates or min(rates) <= 0 or seconds <= 0 or sum(rates) * seconds * ROUNDS * len(methods) > MOST:
        raise UserError(f"rates and seconds are positive, and make up {MOST} requests at most")
    if bool(url) != bool(key):
        raise UserError("a running service is named by both --url and --key")
    with ExitStack() as stack:
        if url and key:
            service = stack.enter_context(running_service(url, key))
        else:
            service = stack.enter_context(started_service(workdir / "serve", model, vllm=vllm))
        bodies = _bodies(service, answer_tokens)
        rows = [row for rate in rates for row in _rate(service, bodies, rate, methods, seconds, ttft_limit, seed)]
        record = {
            "benchmark": "serve", "engine": "vllm" if vllm else "torch", "model": service.model(), "seconds": seconds,
            "rounds": ROUNDS, "seed": seed,
            "ttft_limit_s": ttft_limit, "answer_tokens": answer_tokens, "rows": rows, "load": os.getloadavg()[0],
        }  # fmt: skip
    _print(record)
    write_record(record, out)
    return record


def _bodies(service: Service, answer_tokens: int) -> list[dict[str, Any]]:
    """Questions about the sample documents, which are ingested first."""
    questions = [json.loads(line) for line in (SAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    folders = sorted({question["corpus"] for question in questions})
    files = [path for folder in folders for path in sorted((SAMPLES / folder).rglob("*")) if path.is_file()]
    corpus = service.corpus("bench-serve", [(str(path.relative_to(SAMPLES)), path.read_bytes()) for path in files])
    model = f"{service.model()}@{corpus}"
    return [
        {"model": model, "max_tokens": answer_tokens, "messages": [{"role": "user", "content": question["question"]}]}
        for question in questions
    ]


def _rate(
    service: Service, bodies: list[dict[str, Any]], rate: float, methods: list[str], seconds: float, ttft_limit: float,
    seed: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row for each method; in each round the same arrivals for all, and who comes first changes."""
    asked: dict[str, list[Asked]] = {method: [] for method in methods}
    for turn in range(ROUNDS):
        times = schedule(rate, seconds, seed + turn)
        for method in methods if turn % 2 == 0 else reversed(methods):
            chosen = [{**body, "preread": {"method": method}} for body in bodies]
            asked[method] += asyncio.run(offer(service.api.address, service.key, chosen, times))
    return [
        {"rate": rate, "method": method, **summary(asked[method], ROUNDS * seconds, ttft_limit)} for method in methods
    ]


def _print(record: dict[str, Any]) -> None:
    limit = f"goodput: answers a second whose first token came within {record['ttft_limit_s']:g} s"
    table = Table(title=f"{record['model']}, Poisson arrivals, {record['rounds']} x {record['seconds']:g} s each; {limit}")
    for column in ("rate /s", "method", "offered", "answered", "goodput /s", "ttft s p50", "p95", "p99",
                   "token ms p50", "p95", "p99", "429", "retry-after s", "errors"):  # fmt: skip
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in record["rows"]:
        ttft, gaps, told = row["ttft_s"] or {}, row["inter_token_s"] or {}, row["retry_after_s"] or {}
        table.add_row(
            f"{row['rate']:g}", row["method"], str(row["offered"]), str(row["answered"]), f"{row['goodput_per_s']:.2f}",
            *(_shown(ttft, name, 1, 2) for name in SHARES), *(_shown(gaps, name, 1000, 0) for name in SHARES),
            f"{row['shed']} ({row['shed_with_retry_after']} told)", _shown(told, "p50", 1, 0),
            str(sum(row["errors"].values())),
        )  # fmt: skip
    console().print(table)


def _shown(values: dict[str, float], name: str, factor: float, digits: int) -> str:
    return f"{factor * values[name]:.{digits}f}" if values else "-"
