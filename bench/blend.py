"""`preread bench blend`: quality and speed of blending methods beside full prefill, on a question set.

Names: `full`, `full-twice` (chunks repeated), `none` (no context), `default` (what the product serves), and every method
of `serving.blend.methods`. `reuse`, `epic:K` and `cacheblend:R` are run as published, on chunks compiled alone; others on
chunks compiled as the product does. `NAME@alone` and `NAME@warm` choose by hand; `NAME@document`: chunks that the record
says are of one document are read one behind the other, in an order that is not the prompt's.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.harness import Example, console, drive, exact, f1, grounded, load_examples, load_reader, store_by, write_record
from precompute.frame import Turn
from precompute.passes import ContiguousPass
from precompute.reader import Reader
from serving.blend.assembly import Assembly, Segment, assemble
from serving.blend.methods import parse_method
from serving.settings import Settings
from storage.conditioning import readings
from storage.folder import FolderStore
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.types import KVProfile, KVRecord

ALONE = ("reuse", "epic", "cacheblend")
ANSWER_TOKENS = 32
DEADLINE_S = 600.0


@dataclass
class Scores:
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    em: list[float] = field(default_factory=list)
    recomputed: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    full_ttft: list[float] = field(default_factory=list)
    bytes_per_token: float = 0.0


class Bench:
    """Runs methods over examples; stored KV lies in a folder under `workdir` and is read from there each time."""

    def __init__(self, reader: Reader, workdir: Path) -> None:
        self.reader = reader
        self.store = KVStore(FolderStore(workdir / "kv"))
        store_by(reader, Settings().stored_codec, [self.store])
        self._alone = reader.buffer(0)
        self.bytes_per_token: dict[str, float] = {}

    def profile(self, condition: str) -> KVProfile:
        """As the product stores it; published methods (`alone`) never had a codec, so theirs is raw."""
        warm = self.reader.profile
        return replace(warm, conditioning="alone", codec="raw") if condition == "alone" else warm

    def save(self, example: Example, condition: str) -> list[str]:
        """Compile and store the chunks; their keys."""
        profile, chunks = self.profile(condition), example.chunks
        read: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {tuple(ids): (tuple(ids),) for ids in chunks}
        if condition == "document" and example.document is not None:
            order = sorted(read, key=lambda ids: hashlib.sha256(repr(ids).encode()).digest())
            read = dict(zip(order, readings(order, "document"), strict=True))
        if condition == "alone":
            tensors = self.reader.compile_behind(self._alone, chunks)
        else:
            tensors = self.reader.compile_readings([read[tuple(ids)] for ids in chunks])
        keys, size = [], 0
        for ids, kv in zip(chunks, tensors, strict=True):
            key = kv_key(profile, tuple(ids), "bench", b"bench", read[tuple(ids)][:-1])
            size += self.store.put(KVRecord(key, profile, tuple(ids), kv))
            keys.append(key)
        self.bytes_per_token[condition] = size / sum(map(len, chunks))
        return keys

    def segments(self, example: Example, chunks: Sequence[list[int]], kv: Sequence[torch.Tensor | None]) -> list[Segment]:
        if not chunks:
            return [Segment("tail", tuple(self.reader.format.plain([Turn("user", example.question)])))]
        return grounded(self.reader, chunks, kv, example.question)

    def full(self, example: Example, chunks: Sequence[list[int]], extra: int) -> tuple[Assembly, torch.Tensor, float]:
        """Full prefill, from token ids to logits, with the time it took in seconds."""
        begun = time.perf_counter()
        segments = self.segments(example, chunks, [None] * len(chunks))
        whole = Segment("tail", tuple(i for s in segments for i in s.ids))
        assembly = assemble(self.reader, [whole], extra)
        logits = drive(parse_method("full").blend(self.reader, assembly))
        return assembly, logits, time.perf_counter() - begun

    def blended(
        self, example: Example, keys: Sequence[str], condition: str, method: str, extra: int
    ) -> tuple[Assembly, torch.Tensor, float]:
        """A blended prompt, from stored objects on disk to logits, with the time it took in seconds."""
        begun = time.perf_counter()
        records = self.store.get_many(list(dict.fromkeys(keys)), self.profile(condition), DEADLINE_S)
        kv = [r.kv if isinstance(r := records[key], KVRecord) else None for key in keys]
        chosen = parse_method(method)
        segments = self.segments(example, example.chunks, kv)
        assembly = assemble(self.reader, segments, extra, stored_labels=chosen.stored_labels)
        logits = drive(chosen.blend(self.reader, assembly))
        return assembly, logits, time.perf_counter() - begun

    @torch.inference_mode()
    def answer_logprobs(self, assembly: Assembly, first: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [answer tokens, vocab] under teacher forcing."""
        rows = [first[None]]
        if len(answer) > 1:
            ids = torch.tensor(answer[:-1], device=self.reader.device)
            at = assembly.tokens
            positions = torch.arange(at, at + len(ids), device=self.reader.device)
            out = self.reader.model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, kv_pass=ContiguousPass(assembly.kv, at)
            )
            rows.append(out.logits[0].float())
        return torch.log_softmax(torch.cat(rows), -1)

    def greedy(self, assembly: Assembly, logits: torch.Tensor) -> str:
        ids: list[int] = []
        while len(ids) < ANSWER_TOKENS and (token := int(logits.argmax())) not in self.reader.stop_ids:
            at = assembly.tokens + len(ids)
            ids.append(token)
            step = torch.tensor([token], device=self.reader.device), torch.tensor([at], device=self.reader.device)
            logits = self.reader.forward(*step, ContiguousPass(assembly.kv, at))  # type: ignore[assignment]
        return self.reader.tokenizer.decode(ids)


def condition_of(name: str) -> tuple[str, str]:
    """`cacheblend:0.15` → (method, "alone" | "warm")."""
    method, _, chosen = name.partition("@")
    return method, chosen or ("alone" if method.partition(":")[0] in ALONE else "warm")


def run(
    *, model: str | None, data: Path, methods: Sequence[str], limit: int, max_tokens: int, out: Path | None, workdir: Path,
    device: str = "cpu", dtype: str = "bfloat16", progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark and print its table; the record is also written to `out`."""
    reader = load_reader(model, device=device, dtype=dtype)
    bench = Bench(reader, workdir)
    examples = load_examples(data, reader, limit, max_tokens)
    reader.frame_kv(), reader.label_kv()
    scores: dict[str, Scores] = defaultdict(Scores)
    for number, example in enumerate(examples, 1):
        _example(bench, example, methods, scores)
        progress(f"{number}/{len(examples)}")
    record = {"model": reader.name, "data": data.name, "n": len(examples), "max_tokens": max_tokens, "methods": {}}
    record["methods"] = {name: _summary(s, scores["full"]) for name, s in scores.items()}
    _print(record)
    write_record(record, out)
    return record


def _example(bench: Bench, example: Example, methods: Sequence[str], scores: dict[str, Scores]) -> None:
    answer = bench.reader.tokenizer.encode(example.answers[0])
    extra = max(len(answer), ANSWER_TOKENS)
    conditions = {condition_of(m)[1] for m in methods if m not in ("full", "full-twice", "none")}
    keys = {c: bench.save(example, c) for c in sorted(conditions)}
    assembly, logits, full_ttft = bench.full(example, example.chunks, extra)
    truth = bench.answer_logprobs(assembly, logits, answer)
    _score(bench, scores["full"], example, answer, truth, truth, bench.greedy(assembly, logits), full_ttft, full_ttft, 0.0)
    for name in methods:
        if name == "full":
            continue
        if name in ("none", "full-twice"):
            chunks = [] if name == "none" else [*example.chunks, *example.chunks]
            assembly, logits, ttft = bench.full(example, chunks, extra)
            share = 0.0
        else:
            method, condition = condition_of(name)
            assembly, logits, ttft = bench.blended(example, keys[condition], condition, method, extra)
            stored = sum(b - a for a, b in assembly.spans)
            share = assembly.recomputed_token_layers / (stored * bench.reader.layers)
            scores[name].bytes_per_token = bench.bytes_per_token[condition]
        found = bench.answer_logprobs(assembly, logits, answer)
        text = bench.greedy(assembly, logits)
        _score(bench, scores[name], example, answer, truth, found, text, ttft, full_ttft, share)


def _score(
    bench: Bench, scores: Scores, example: Example, answer: Sequence[int], truth: torch.Tensor, found: torch.Tensor,
    text: str, ttft: float, full_ttft: float, share: float,
) -> None:  # fmt: skip
    index = torch.tensor(answer, device=found.device)[:, None]
    scores.nll.append(-float(found.gather(1, index).mean()))
    scores.kl.append(float((truth.exp() * (truth - found)).sum(-1).mean()))
    scores.f1.append(f1(text, example.answers))
    scores.em.append(exact(text, example.answers))
    scores.ttft.append(ttft)
    scores.full_ttft.append(full_ttft)
    scores.recomputed.append(share)


def _summary(scores: Scores, full: Scores) -> dict[str, Any]:
    differences = [a - b for a, b in zip(scores.nll, full.nll, strict=True)]
    n = len(differences)
    error = statistics.stdev(differences) / n**0.5 if n > 1 else 0.0
    gains = [a - b for a, b in zip(scores.f1, full.f1, strict=True)]
    return {
        "n": n, "nll": statistics.mean(scores.nll), "d_nll": statistics.mean(differences), "d_nll_se": error,
        "d_nll_ci": bootstrap(differences), "kl": statistics.mean(scores.kl), "kl_ci": bootstrap(scores.kl),
        "f1": statistics.mean(scores.f1), "d_f1": statistics.mean(gains), "d_f1_ci": bootstrap(gains),
        "em": statistics.mean(scores.em),
        "recomputed": statistics.mean(scores.recomputed), "ttft_s": statistics.median(scores.ttft),
        "full_ttft_s": statistics.median(scores.full_ttft), "bytes_per_token": scores.bytes_per_token,
    }  # fmt: skip


def bootstrap(values: Sequence[float], rounds: int = 2000) -> list[float]:
    """95 % percentile interval of the mean, resampling the values (paired differences) with a fixed seed."""
    data = torch.tensor(values, dtype=torch.float64)
    picks = torch.randint(len(data), (rounds, len(data)), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(data[picks].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [low, high]


def _print(record: dict[str, Any]) -> None:
    table = Table(title=f"{record['model']} on {record['data']}, n={record['n']}")
    for column in ("method", "nll", "d_nll (se)", "kl", "f1", "d_f1 (95 %)", "em", "recomputed", "ttft s", "B/token"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, m in record["methods"].items():
        table.add_row(
            name, f"{m['nll']:.3f}", f"{m['d_nll']:+.3f} ({m['d_nll_se']:.3f})", f"{m['kl']:.4f}", f"{m['f1']:.3f}",
            f"{m['d_f1']:+.3f} ({m['d_f1_ci'][0]:+.3f} {m['d_f1_ci'][1]:+.3f})",
            f"{m['em']:.3f}", f"{m['recomputed']:.1%}", f"{m['ttft_s']:.3f}", f"{m['bytes_per_token']:.0f}",
        )  # fmt: skip
    console().print(table)
