"""`python -m bench.gpu --model DIR`: on a machine with a GPU, whether a model may be blended in vLLM there, and what it brings.

Gates first (the reader's own probe; that blending everything is full prefill; that blending answers), then time to the first
token at 4k, 16k and 32k, then throughput, each as far as the seconds reach. One JSON record goes to standard output.

NEVER RUN ON A GPU SO FAR: only with `--device cpu` and short prompts, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness import machine
from bench.vllm_site import VLLMSite, vllm_site
from bench.vllm_ttft import measure
from storage.errors import UserError

SECONDS = 460.0  # of 480, the rest is for ending
EXACT = "cacheblend:1.0"  # computes all stored tokens again: full prefill by another way
ROUNDS = 3
AT_ONCE, ANSWER_TOKENS = 16, 64
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}  # of a log-probability, for kernels of other batch shapes


def run(
    *, model: str, tokens: Sequence[int], workdir: Path, vllm: Path, device: str = "cuda", dtype: str = "bfloat16",
    seconds: float = SECONDS, arguments: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The record. What there was no time for is named in `left_out`. Raises UserError."""
    end = time.monotonic() + seconds
    record: dict[str, Any] = {"benchmark": "gpu", "model": Path(model).name, "device": device, "dtype": dtype, "left_out": []}
    with vllm_site(model, workdir, vllm, tokens, device=device, dtype=dtype, arguments=arguments) as site:
        record["ready_s"] = round(seconds - (end - time.monotonic()), 1)  # the reader's probe, chunks compiled, vLLM started
        record["gates"] = _gates(site, min(tokens), dtype)
        stages = {f"ttft {length}": lambda length=length: measure(site, length, ("full", "default"), ROUNDS) for length in tokens}
        for name, stage in stages.items():
            _do(record, name, stage, end)
        for method in ("full", "default"):
            _do(record, f"throughput {method}", lambda method=method: asyncio.run(_throughput(site, min(tokens), method)), end)
    record["machine"] = machine()
    return record


def _do(record: dict[str, Any], name: str, stage: Any, end: float) -> None:
    if time.monotonic() >= end:
        record["left_out"].append(name)
    else:
        record[name] = stage()


def _gates(site: VLLMSite, length: int, dtype: str) -> dict[str, Any]:
    """How far a blend that computes everything is from full prefill, by the first token's log-probabilities."""
    full, exact, default = (asyncio.run(_likely(site, length, method)) for method in ("full", EXACT, "default"))
    apart = max((abs(full[token] - exact[token]) for token in full.keys() & exact.keys()), default=float("inf"))
    return {
        "exact_max_logprob_difference": apart,
        "exact_passed": apart <= TOLERANCE[dtype],
        "default_same_first_token": max(full, key=full.__getitem__) == max(default, key=default.__getitem__),
    }


async def _likely(site: VLLMSite, length: int, method: str) -> dict[bytes, float]:
    """The likeliest first tokens of an answer."""
    request = replace(site.request(length, method, -1), logprobs=5)
    generation = site.engine.submit(request, await asyncio.to_thread(site.engine.prepare, request))
    found: dict[bytes, float] = {}
    async for delta in generation:
        found = found or {token.bytes: token.logprob for token in delta.tokens[0].top}
    return found


async def _throughput(site: VLLMSite, length: int, method: str) -> dict[str, float]:
    """Answers of ANSWER_TOKENS to AT_ONCE different questions at once: tokens a second, and the slowest first token."""
    requests = [site.request(length, method, 1000 + number, ANSWER_TOKENS) for number in range(AT_ONCE)]
    begun = time.perf_counter()
    answered = await asyncio.gather(*(site.ask(request) for request in requests))
    took = time.perf_counter() - begun
    written = sum(each.outcome.completion_tokens for each in answered)
    return {
        "at_once": AT_ONCE, "seconds": took, "answer_tokens_per_s": written / took, "answers_per_s": AT_ONCE / took,
        "prompt_tokens_per_s": sum(each.outcome.prompt_tokens for each in answered) / took,
        "slowest_ttft_s": max(each.ttft_s for each in answered),
    }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the model's folder")
    parser.add_argument("--tokens", default="4096,16384,32768", help="prompt lengths, separated by commas")
    parser.add_argument("--vllm", type=Path, default=Path("build/vllm"), help="environment with vLLM (a CUDA build) and Preread")
    parser.add_argument("--workdir", type=Path, default=Path("build/bench-gpu"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no further stage begins")
    given, more = parser.parse_known_args(arguments)  # what it does not know goes to `vllm serve`
    lengths = [int(word) for word in given.tokens.split(",")]
    try:
        record = run(
            model=given.model, tokens=lengths, workdir=given.workdir, vllm=given.vllm, device=given.device, dtype=given.dtype,
            seconds=given.seconds, arguments=more,
        )  # fmt: skip
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
