"""`preread bench serve --engine vllm --trace …`: vLLM with stored KV beside the same vLLM with its own prefix cache alone.

`recurring`: each prompt has PICKED of the pool's documents, in any order, and a question of its own; `prefix`: the same few
orders again and again, so that a prefix cache has all but the question. Both arrive open-loop (`bench/open_loop.py`); `full`
is vLLM with its prefix cache, shared by all, and `lmcache` such a vLLM with LMCache behind that (`bench/lmcache.py`). `chats`:
AT_ONCE answers at once over documents, their tokens a second while all are written; and the time between tokens of WRITERS
other answers while such prompts come in.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.harness import console, write_record
from bench.lmcache import LMCACHE, hit_tokens, lmcache, prove
from bench.open_loop import PATIENCE_S, Asked, schedule, spread, summary
from bench.vllm_site import VLLMSite, tree_cpu_seconds, vllm_site
from serving.engine.types import GenerateRequest, Message
from storage.errors import PrereadError, UserError

POOL, PICKED, ORDERS = 7680, 10, 3  # tokens of all documents; documents of a prompt; orders of the trace of prefixes
TRACES = ("recurring", "prefix", "chats")
AT_ONCE, CHAT_TOKENS = 8, 400  # long enough that all are written at once for a while, whichever came first
WRITERS, WRITERS_TOKENS, EVERY_S, FIRST_S = 4, 160, 2.0, 1.5


def run(
    *, trace: str, rates: Sequence[float], methods: Sequence[str], seconds: float, ttft_limit: float, answer_tokens: int,
    vllm: Path, out: Path | None, workdir: Path, model: str | None = None, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Run one trace, print its table, return the record. Raises UserError."""
    if trace not in TRACES:
        raise UserError(f"--trace is one of {', '.join(TRACES)}, not {trace!r}")
    if trace == "chats" and LMCACHE in methods:
        raise UserError(f"--methods {LMCACHE} is for the traces that arrive open-loop, not for chats")
    row = partial(_row, trace=trace, seconds=seconds, ttft_limit=ttft_limit, tokens=answer_tokens, seed=seed)
    ours, rows = [method for method in methods if method != LMCACHE], []
    if LMCACHE in methods:  # the first: where it is not there, nobody waits for the others to hear so
        with lmcache(vllm, workdir) as peer, vllm_site(model, workdir, vllm, [POOL], **peer) as site:
            prove(site, _request(site, _picked(site, random.Random("warm")), LMCACHE, "warm", 2))
            rows += [row(site, LMCACHE, rate) for rate in rates]
    with vllm_site(model, workdir, vllm, [POOL]) as site:
        asyncio.run(_first(site, ours))
        if trace == "chats":
            for turn, order in enumerate((ours, ours[::-1])):  # other prompts each time: `full` would find its own
                rows += [asyncio.run(_chats(site, method, seed + 10 * turn)) for method in order]
            rows += [asyncio.run(_beside(site, method, seed)) for method in ("nothing", *ours)]
        else:
            rows += [row(site, method, rate) for rate in rates for method in ours]
            rows.sort(key=itemgetter("rate"))
        record = {
            "benchmark": "serve", "engine": "vllm", "trace": trace, "model": site.engine.model_id, "seed": seed,
            "seconds": seconds, "ttft_limit_s": ttft_limit, "answer_tokens": answer_tokens, "rows": rows,
        }  # fmt: skip
    _print(record)
    write_record(record, out)
    return record


def _row(
    site: VLLMSite, method: str, rate: float, *, trace: str, seconds: float, ttft_limit: float, tokens: int, seed: int
) -> dict[str, Any]:
    prompts, before = _prompts(site, trace, method, tokens, seed, rate), hit_tokens(site.url)
    cpu = tree_cpu_seconds(site.pid)
    asked = asyncio.run(_offer(site, prompts, schedule(rate, seconds, seed)))
    hits = {name: total - before[name] for name, total in hit_tokens(site.url).items()}
    spent = {"hit_tokens": hits, "cpu_s": tree_cpu_seconds(site.pid) - cpu}
    return {"rate": rate, "method": method, **summary(asked, seconds, ttft_limit), **spent}


async def _first(site: VLLMSite, methods: Sequence[str]) -> None:
    """Kernels and stored objects are warm, and no figure is of a prompt whose chunks had no place or were not used."""
    draw = random.Random("warm")
    for method in methods:
        await site.ask(_request(site, _picked(site, draw), method, "warm", 2))


def _prompts(
    site: VLLMSite, trace: str, method: str, tokens: int, seed: int, rate: float = 0
) -> Callable[[int], GenerateRequest]:
    """Request `number` of a trace: the same documents and question for every method, and other ones at another rate, whose
    prompts a prefix cache would have by then."""
    draw = random.Random(seed)
    orders = [_picked(site, draw) for _ in range(ORDERS)]

    def prompt(number: int) -> GenerateRequest:
        chosen = random.Random(f"{seed}-{rate}-{number}")
        picked = orders[chosen.randrange(ORDERS)] if trace == "prefix" else _picked(site, chosen)
        return _request(site, picked, method, f"{trace} {seed} {rate} {number}", tokens)

    return prompt


def _picked(site: VLLMSite, draw: random.Random) -> list[int]:
    return draw.sample(range(len(site.prompts[POOL])), PICKED)


def _request(site: VLLMSite, picked: Sequence[int], method: str, name: str, tokens: int) -> GenerateRequest:
    made = site.request(POOL, "full" if method == LMCACHE else method, 0, tokens)
    chunks = tuple(replace(site.prompts[POOL][number], corpus_id="bench") for number in picked)
    return replace(made, chunks=chunks, messages=(Message("user", f"{made.messages[0].content} ({name})"),))


async def _offer(site: VLLMSite, prompt: Callable[[int], GenerateRequest], times: Sequence[float]) -> list[Asked]:
    begun = time.perf_counter()

    async def one(number: int, at: float) -> Asked:
        await asyncio.sleep(begun + at - time.perf_counter())
        return await _answer(site, prompt(number), begun + at)

    return list(await asyncio.gather(*(one(number, at) for number, at in enumerate(times))))


async def _answer(site: VLLMSite, request: GenerateRequest, due: float) -> Asked:
    asked, last = Asked(due, status=200), 0.0
    generation = site.engine.submit(request, await asyncio.to_thread(site.engine.prepare, request))
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for _ in generation:
                now = time.perf_counter()
                if asked.ttft is None:
                    asked.ttft = now - due
                else:
                    asked.gaps.append(now - last)
                last = now
            asked.finished = True
    except (PrereadError, TimeoutError) as error:
        asked.error = type(error).__name__
    finally:
        if not asked.finished:
            generation.cancel()  # else vLLM would go on with it, at the cost of those that come later
    return asked


async def _chats(site: VLLMSite, method: str, seed: int) -> dict[str, Any]:
    """Tokens a second of all answers from when the last one has begun to when the first one ends, so that what stored KV saves
    before the first token does not count; and over all."""
    prompt = _prompts(site, "recurring", method, CHAT_TOKENS, seed + 1)
    written: list[list[tuple[float, int]]] = []  # by answer: when there were how many tokens

    async def one(number: int) -> None:
        request, times = prompt(number), []
        generation = site.engine.submit(request, await asyncio.to_thread(site.engine.prepare, request))
        async for _ in generation:
            times.append((time.perf_counter(), generation.written or 0))
        written.append(times)

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(AT_ONCE)))
    start, end = max(times[0][0] for times in written), min(times[-1][0] for times in written)
    inside = [[tokens for at, tokens in times if start <= at <= end] for times in written]
    tokens = sum(each[-1] - each[0] for each in inside if each)
    return {
        "method": method, "at_once": AT_ONCE, "tokens_per_s": tokens / (end - start) if end > start else 0.0,
        "tokens": tokens, "seconds": max(times[-1][0] for times in written) - begun,
    }  # fmt: skip


async def _beside(site: VLLMSite, method: str, seed: int) -> dict[str, Any]:
    """The time between tokens of plain answers while other prompts come in, blended or computed in full; or `nothing`."""
    draw = random.Random(seed)
    writer = replace(_request(site, [], "full", "writer", WRITERS_TOKENS), chunks=())
    writers = [replace(writer, messages=(Message("user", f"Count ({draw.random()})."),)) for _ in range(WRITERS)]
    prompt = _prompts(site, "recurring", method, 1, seed + 2) if method != "nothing" else None
    running = [asyncio.create_task(_answer(site, each, time.perf_counter())) for each in writers]
    beside: list[asyncio.Task[Asked]] = []
    await asyncio.sleep(FIRST_S)
    while prompt and not all(task.done() for task in running):
        beside.append(asyncio.create_task(_answer(site, prompt(len(beside)), time.perf_counter())))
        await asyncio.sleep(EVERY_S)
    asked = await asyncio.gather(*running)
    for task in beside:  # nobody writes beside those any more
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    return {
        "beside": method, "prompts": len(beside), "every_s": EVERY_S,
        "inter_token_s": spread([gap for one in asked for gap in one.gaps]),
    }  # fmt: skip


def _print(record: dict[str, Any]) -> None:
    table = Table(title=f"vLLM, {record['model']}, trace {record['trace']}, goodput at {record['ttft_limit_s']:g} s")
    names = dict.fromkeys(name for row in record["rows"] for name in row)
    for name in names:
        table.add_column(name.replace("_", " "))
    for row in record["rows"]:
        table.add_row(*(_shown(row.get(name)) for name in names))
    console().print(table)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " / ".join(_shown(each) for each in value.values()) or "-"
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
