"""Open-loop load: requests arrive by a seeded Poisson process, whether or not earlier ones were answered.

All times count from the moment when a request was due, not from when a busy client got to send it: else a service that
stalls would be measured less often just then (coordinated omission).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE_S = 120.0  # then a client gives up
SHARES = (50, 95, 99)


@dataclass
class Asked:
    """One request and what became of it; times in seconds. `status` 0: the connection failed."""

    due: float
    status: int = 0
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    finished: bool = False
    retry_after: str | None = None
    error: str | None = None


def schedule(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of arrival, in seconds from the start."""
    draw, at, times = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        times.append(at)
    return times


async def offer(address: str, key: str, bodies: Sequence[dict[str, Any]], times: Sequence[float]) -> list[Asked]:
    """Ask for streamed chats at these times, with the bodies in turn; returns when all have ended."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=PATIENCE_S, limits=limits) as client:
        begun = time.perf_counter()

        async def one(number: int, at: float) -> Asked:
            await asyncio.sleep(begun + at - time.perf_counter())
            asked = Asked(begun + at)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await _ask(client, bodies[number % len(bodies)], asked)
            except (httpx.HTTPError, TimeoutError) as error:
                asked.error = type(error).__name__
            return asked

        return list(await asyncio.gather(*(one(number, at) for number, at in enumerate(times))))


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], asked: Asked) -> None:
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        asked.status, asked.retry_after = reply.status_code, reply.headers.get("retry-after")
        if reply.status_code != 200:
            await reply.aread()
            return
        last = 0.0
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                asked.finished = asked.error is None
                return
            event = json.loads(line[6:])
            if "error" in event:
                asked.error = str(event["error"].get("code"))
            elif event["choices"] and event["choices"][0]["delta"].get("content"):
                now = time.perf_counter()
                if asked.ttft is None:
                    asked.ttft = now - asked.due
                else:
                    asked.gaps.append(now - last)
                last = now


def summary(asked: Sequence[Asked], seconds: float, ttft_limit: float) -> dict[str, Any]:
    """Figures of one load that was offered for so long. Goodput: answers a second whose first token came within the
    limit. Tokens: a stream's events with text, which are a token each or a little more."""
    whole = [one for one in asked if one.finished]
    shed = [one for one in asked if one.status == 429]
    in_time = [one for one in whole if one.ttft is not None and one.ttft <= ttft_limit]
    errors = [one.error or str(one.status) for one in asked if not one.finished and one.status != 429]
    return {
        "offered": len(asked),
        "offered_per_s": round(len(asked) / seconds, 3),
        "answered": len(whole),
        "shed": len(shed),
        "shed_with_retry_after": sum(one.retry_after is not None for one in shed),
        "retry_after_s": spread([float(one.retry_after) for one in shed if one.retry_after], 0),
        "errors": {name: errors.count(name) for name in sorted(set(errors))},
        "goodput_per_s": round(len(in_time) / seconds, 3),
        "ttft_s": spread([one.ttft for one in whole if one.ttft is not None]),
        "inter_token_s": spread([gap for one in whole for gap in one.gaps]),
    }


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float] | None:
    """p50, p95 and p99; None of nothing."""
    if not values:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {f"p{share}": round(cuts[share - 1], digits) for share in SHARES}
