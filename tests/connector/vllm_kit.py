"""vLLM with our connector, in a process of its own, beside our own reader over the same model folder and store."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_models import Models, retrieved

from precompute.reader import Reader
from serving.blend.assembly import Segment, assemble
from serving.blend.methods import parse_method
from serving.connector.plan import Plan, Span, Told, cache_salt, plan_secret, sign, token_hash
from serving.engine.sessions import BlendSession
from serving.engine.types import Message
from serving.prompt import PromptPlan, plan_prompt
from storage.folder import FolderStore
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.types import KVRecord, RetrievedChunk

PYTHON = Path(__file__).parents[2] / "build" / "vllm" / "bin" / "python"
SECRET = "a master secret for tests only, 32 bytes"
BLOCK = 32
CONNECTOR = {
    "kv_connector": "PrereadConnector", "kv_connector_module_path": "serving.connector.adapter", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"patience_s": 60},
}  # fmt: skip


class VLLM:
    """A running engine. `data`: the installation's data folder; `options`: of `LLM`."""

    def __init__(self, model: Path, data: Path, **options: Any) -> None:
        if not PYTHON.exists():
            pytest.skip("vLLM is not installed: run `make vllm`")
        given: dict[str, Any] = {
            "model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 8,
            "block_size": BLOCK, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 256, "kv_transfer_config": CONNECTOR,
            "disable_log_stats": True, "seed": 0,
        }  # fmt: skip
        environment = {
            **os.environ, "PREREAD_DATA_DIR": str(data), "PREREAD_SECRET": SECRET, "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip
        environment.pop("PYTHONPATH", None)
        self.log = data / "vllm.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), str(Path(__file__).with_name("vllm_child.py")), json.dumps({**given, **options})],
                env=environment, cwd=PYTHON.parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"vLLM has ended:\n{self.log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, what: str, **given: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **given}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def run(self, *requests: dict[str, Any]) -> list[Answer]:
        """The answers to requests that are made at once; of an aborted one None of its tokens."""
        found = self.do("run", requests=list(requests))
        return [Answer(**found[each["id"]]) if each["id"] in found else Answer([], [], None, 0, "abort") for each in requests]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        finally:
            self._process.stdout.close()


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[dict[str, float]]
    params: Any
    cached: int | None
    reason: str
    step: int = 0  # of the engine, in which it ended

    @property
    def told(self) -> Told:
        return Told.read(self.params)


def gap(a: Answer, b: Answer) -> float:
    """The largest difference of log-probabilities of the first token, over those that both tell of."""
    first, second = a.logprobs[0], b.logprobs[0]
    shared = first.keys() & second.keys()
    assert len(shared) >= 10
    return max(abs(first[token] - second[token]) for token in shared)


class Installation:
    """A data folder with chunks and labels compiled by our own reader, and the prompts over them."""

    def __init__(self, reader: Reader, data: Path, lengths: Sequence[int]) -> None:
        self.reader, self.data = reader, data
        self.store = KVStore(FolderStore(data / "objects"))
        generator = torch.Generator().manual_seed(5)
        ids = [tuple(torch.randint(10, 400, (n,), generator=generator).tolist()) for n in lengths]
        keys = [kv_key(reader.profile, i, "g", b"s") for i in ids]
        for key, tokens, kv in zip(keys, ids, reader.compile(ids), strict=True):
            self.store.put(KVRecord(key, reader.profile, tokens, kv))
        self.chunks = tuple(retrieved(n, i, key) for n, (i, key) in enumerate(zip(ids, keys, strict=True)))
        self.labels = [kv_key(reader.profile, (n,), "labels", b"s") for n in range(len(reader.label_kv()))]
        for number, (key, kv) in enumerate(zip(self.labels, reader.label_kv(), strict=True), 1):
            self.store.put(KVRecord(key, reader.profile, tuple(reader.format.label(number)), kv))
        self._number = 0

    def stored(self, count: int, seed: int) -> tuple[RetrievedChunk, ...]:
        """Further chunks, of their own."""
        generator = torch.Generator().manual_seed(100 + seed)
        found = []
        for number in range(count):
            ids = tuple(torch.randint(10, 400, (60 + number,), generator=generator).tolist())
            key, [kv] = kv_key(self.reader.profile, ids, "g", b"s"), self.reader.compile([ids])
            self.store.put(KVRecord(key, self.reader.profile, ids, kv))
            found.append(retrieved(50 + number, ids, key))
        return tuple(found)

    def path(self, chunk: RetrievedChunk) -> Path:
        [path] = (self.data / "objects").rglob(str(chunk.kv_key))
        return path

    def prompt(self, question: str, chunks: Sequence[RetrievedChunk] | None = None) -> PromptPlan:
        chosen = self.chunks if chunks is None else chunks
        return plan_prompt(self.reader.format, (Message("user", question),), chosen, self.reader.max_positions, 64)

    def plan(self, prompt: PromptPlan, method: str, **changes: Any) -> Plan:
        """As the API would make it: chunks are spans, and so are labels before stored chunks where the method has them stored."""
        spans, at = [], len(prompt.frame)
        for number, (label, chunk) in enumerate(zip(prompt.labels, prompt.chunks, strict=True)):
            if parse_method(method).stored_labels:
                spans.append(Span(at, len(label), self.labels[number], token_hash(label), kind="label"))
            at += len(label)
            ids = chunk.token_ids
            spans.append(Span(at, len(ids), str(chunk.kv_key), token_hash(ids), best=number == 0))
            at += len(ids)
        expires = int(time.time()) + 600
        made = Plan(self.reader.profile, tuple(spans), method, at, "acme", "acme/g", expires, thread=token_hash(prompt.tail))
        return replace(made, **changes)

    def request(self, prompt: PromptPlan, plan: Plan | None = None, **changes: Any) -> dict[str, Any]:
        """One request to vLLM: plain, or with its plan."""
        self._number += 1
        made: dict[str, Any] = {"id": f"r{self._number}", "prompt": ids_of(prompt), "logprobs": 20}
        if plan is not None:
            made |= {"params": sign(plan, plan_secret(SECRET.encode())), "salt": cache_salt(plan)}
        return made | changes

    def saving(self, chunk: Sequence[int], key: str) -> dict[str, Any]:
        """A request that has a chunk read behind the reader's own prefix, and stored."""
        start = len(self.reader.prefix_ids)
        save = Span(start, len(chunk), key, token_hash(chunk))
        empty = self.prompt("?")
        plan = replace(self.plan(empty, "reuse"), spans=(), saves=(save,), tail_start=0)
        return {**self.request(empty, plan), "prompt": [*self.reader.prefix_ids, *chunk], "salt": None}

    def torch_tokens(self, prompt: PromptPlan, method: str, count: int, lacking: Sequence[int] = ()) -> list[int]:
        """Greedy tokens of our own engine's blend; `lacking`: chunks, by their place, without stored KV."""
        segments = [Segment("frame", prompt.frame)]
        for number, (label, chunk) in enumerate(zip(prompt.labels, prompt.chunks, strict=True)):
            found = self.store.get(str(chunk.kv_key), self.reader.profile)
            kv = found.kv if isinstance(found, KVRecord) and number not in lacking else None
            segments += [Segment("label", label), Segment("chunk", chunk.token_ids, kv, best=number == 0)]
        chosen = parse_method(method)
        whole = [*segments, Segment("tail", prompt.tail)]
        assembly = assemble(self.reader, whole, count, stored_labels=chosen.stored_labels)
        session = BlendSession(self.reader, assembly, chosen)
        pieces = session.start()
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                logits = end.value
                break
        tokens: list[int] = []
        while True:
            tokens.append(int(logits.argmax()))
            if len(tokens) == count:
                return tokens
            logits = session.step(tokens[-1])


def ids_of(prompt: PromptPlan) -> list[int]:
    between = [i for label, chunk in zip(prompt.labels, prompt.chunks, strict=True) for i in (*label, *chunk.token_ids)]
    return [*prompt.frame, *between, *prompt.tail]


def small_reader(models: Models) -> Reader:
    """A tiny decoder whose heads are as wide as vLLM's kernels want them."""
    return models.reader("llama-32", family="llama", head_dim=32)
