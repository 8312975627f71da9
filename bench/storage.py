"""`preread bench storage`: what each codec costs in answers, bytes and time, what encryption costs, and what the tiers'
eviction keeps beside LRU. All of it offline, in the workdir.

Quality is judged after blending: each example's chunks are compiled once, stored by every codec, read back, and blended
as the product does (`default`); KL to full prefill and NLL of the answer are compared with those of the codec `raw` on
the same examples in the same run. A codec that gives back every bit has raw's figures. Times are those of the calling
thread on the processor, for one thread, so that other processes on the machine do not count; decoding is the fastest of
nine, since what a neighbour takes of the caches would count. A GB is 1e9 bytes of the KV in the model's dtype (bf16
unless chosen otherwise), decoded. The model runs on all threads.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.blend import Bench
from bench.harness import Example, console, drive, load_examples, load_reader, write_record
from bench.questions import own_examples
from bench.s3 import measure, reading_table
from bench.trace import eviction_table, replay
from precompute.calibration import STEPS, basis_codec
from precompute.reader import Reader
from serving.blend.assembly import assemble
from serving.blend.methods import parse_method
from serving.settings import codec_for
from storage.codecs import CODECS, Codec
from storage.codecs.shelf import CodecShelf
from storage.folder import FolderStore
from storage.format import encode
from storage.keys import kv_key
from storage.types import CODEC_NAMES, KVRecord

DECODED = 9  # times, the fastest of which counts
OBJECT_MIB = 4  # about 180 tokens of the embedded model's KV, raw


@dataclass
class Tally:
    """What one codec did, over all examples; `kl` and `nll` by the name of the data."""

    kl: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    nll: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stored: int = 0  # bytes of whole objects
    plain: int = 0  # bytes of the KV in bf16
    tokens: int = 0
    encoding: float = 0.0  # seconds
    decoding: float = 0.0


def run(
    *, model: str | None, data: Sequence[Path], limit: int, max_tokens: int, out: Path | None, workdir: Path,
    device: str = "cpu", dtype: str = "bfloat16", names: Sequence[str] = CODEC_NAMES,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark and print its table; the record is also written to `out`."""
    record = _run(load_reader(model, device=device, dtype=dtype), data, limit, max_tokens, workdir, names, progress)
    record |= {"encryption": _encryption(workdir), "eviction": replay()}
    _print(record)
    write_record(record, out)
    return record


def _encryption(workdir: Path) -> list[dict[str, Any]]:
    """Reading objects of a usual size from a folder, plain and sealed with AES-GCM."""
    store, folder = FolderStore(workdir / "storage"), f"bench/{uuid.uuid4().hex}"
    try:
        return measure(store, folder, OBJECT_MIB, readers=1, rounds=5)
    finally:
        store.delete_many(list(store.list(folder)))


def _run(
    reader: Reader, data: Sequence[Path], limit: int, max_tokens: int, workdir: Path, names: Sequence[str],
    progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    bench = Bench(reader, workdir)
    shelf = CodecShelf(FolderStore(workdir / "storage"))
    codecs: dict[str, Codec] = {n: basis_codec(reader, shelf, n) if n in STEPS else CODECS[n] for n in ("raw", *names)}
    sets = {path.name: load_examples(path, reader, limit, max_tokens) for path in data}
    sets = sets or {"samples": own_examples(reader, limit, max_tokens)}
    reader.frame_kv(), reader.label_kv()
    tallies = {name: Tally() for name in codecs}
    for source, examples in sets.items():
        for number, example in enumerate(examples, 1):
            _example(bench, source, example, codecs, tallies)
            progress(f"{source} {number}/{len(examples)}")
    return {
        "model": reader.name, "data": {source: len(examples) for source, examples in sets.items()}, "max_tokens": max_tokens,
        "default": codec_for("s3://"), "codecs": {name: _summary(tallies[name], tallies["raw"]) for name in codecs},
    }  # fmt: skip


def _example(bench: Bench, source: str, example: Example, codecs: dict[str, Codec], tallies: dict[str, Tally]) -> None:
    answer = bench.reader.tokenizer.encode(example.answers[0])
    compiled = bench.reader.compile([tuple(ids) for ids in example.chunks])
    assembly, logits, _ = bench.full(example, example.chunks, len(answer))
    truth = bench.answer_logprobs(assembly, logits, answer)
    exact = (0.0, 0.0)
    for name, codec in codecs.items():
        kept = [_through(bench.reader, codec, ids, kv, tallies[name]) for ids, kv in zip(example.chunks, compiled, strict=True)]
        same = name != "raw" and all(map(torch.equal, kept, compiled))
        scores = exact if same else _blended(bench, example, kept, answer, truth)
        exact = scores if name == "raw" else exact
        tallies[name].kl[source].append(scores[0])
        tallies[name].nll[source].append(scores[1])


@dataclass
class _Watched:
    """A codec that notes how long it takes on one thread, and keeps what it has written."""

    codec: Codec
    sections: list[memoryview] = field(default_factory=list)
    seconds: float = 0.0  # of encoding

    @property
    def name(self) -> str:
        return self.codec.name

    def encode(self, layer: torch.Tensor, number: int = 0) -> memoryview:
        begun = time.thread_time()
        self.sections.append(self.codec.encode(layer, number))
        self.seconds += time.thread_time() - begun
        return self.sections[-1]

    def decode(
        self, sections: Sequence[torch.Tensor], dtype: torch.dtype, layer_shape: tuple[int, int, int, int], first: int = 0
    ) -> torch.Tensor:
        return self.codec.decode(sections, dtype, layer_shape, first)


def _through(reader: Reader, codec: Codec, ids: Sequence[int], kv: torch.Tensor, tally: Tally) -> torch.Tensor:
    """The KV as it comes back from this codec, which works on one thread."""
    profile = replace(reader.profile, codec=codec.name)
    record, watched = KVRecord(kv_key(profile, ids, "bench", b"bench"), profile, tuple(ids), kv.cpu()), _Watched(codec)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tally.stored += sum(map(len, encode(record, watched)))
        buffer = torch.frombuffer(bytearray(b"".join(watched.sections)), dtype=torch.uint8)  # as if it had been read
        sections, times = list(torch.split(buffer, [len(section) for section in watched.sections])), []
        for _ in range(DECODED):
            begun = time.thread_time()
            found = codec.decode(sections, kv.dtype, tuple(kv.shape[1:]))  # type: ignore[arg-type]
            times.append(time.thread_time() - begun)
    finally:
        torch.set_num_threads(threads)
    tally.encoding += watched.seconds
    tally.decoding += min(times)
    tally.plain += 2 * kv.numel()
    tally.tokens += len(ids)
    return found


def _blended(
    bench: Bench, example: Example, kv: Sequence[torch.Tensor], answer: Sequence[int], truth: torch.Tensor
) -> tuple[float, float]:
    """(KL to full prefill, NLL of the answer)."""
    method = parse_method("default")
    segments = bench.segments(example, example.chunks, kv)
    assembly = assemble(bench.reader, segments, len(answer), stored_labels=method.stored_labels)
    found = bench.answer_logprobs(assembly, drive(method.blend(bench.reader, assembly)), answer)
    index = torch.tensor(answer, device=found.device)[:, None]
    return float((truth.exp() * (truth - found)).sum(-1).mean()), -float(found.gather(1, index).mean())


def _summary(tally: Tally, raw: Tally) -> dict[str, Any]:
    by_data = {
        source: {"n": len(kl), "kl_raw": statistics.mean(raw.kl[source]), **_differences(kl, raw.kl[source], "kl_delta"),
                 **_differences(tally.nll[source], raw.nll[source], "d_nll")}
        for source, kl in tally.kl.items()
    }  # fmt: skip
    together = [[value for source in each for value in each[source]] for each in (tally.kl, raw.kl, tally.nll, raw.nll)]
    return {
        "ratio_to_bf16": tally.stored / tally.plain, "bytes_per_token": tally.stored / tally.tokens,
        **_differences(together[0], together[1], "kl_delta"), **_differences(together[2], together[3], "d_nll"),
        "encode_gb_s": tally.plain / tally.encoding / 1e9, "decode_gb_s": tally.plain / tally.decoding / 1e9,
        "by_data": by_data,
    }  # fmt: skip


def _differences(values: Sequence[float], others: Sequence[float], name: str) -> dict[str, float]:
    """Mean and standard error of paired differences."""
    differences = [a - b for a, b in zip(values, others, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return {name: statistics.mean(differences), f"{name}_se": error}


def _print(record: dict[str, Any]) -> None:
    sources = list(record["data"])
    table = Table(title=f"codecs on {record['model']}, n={record['data']}; default: {record['default']}")
    kl = [f"kl {source}" for source in sources]
    for column in ("codec", "of bf16", "B/token", *kl, "d_nll (se)", "encode GB/s", "decode GB/s"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for name, m in record["codecs"].items():
        each = (m["by_data"][source] for source in sources)
        table.add_row(
            name, f"{m['ratio_to_bf16']:.3f}", f"{m['bytes_per_token']:.0f}",
            *(f"{e['kl_delta']:+.4f} ({e['kl_delta_se']:.4f})" for e in each), f"{m['d_nll']:+.3f} ({m['d_nll_se']:.3f})",
            f"{m['encode_gb_s']:.2f}", f"{m['decode_gb_s']:.2f}",
        )  # fmt: skip
    console().print(table)
    console().print(reading_table(record["encryption"], "encryption on the client: reading from a folder"))
    console().print(eviction_table(record["eviction"]))
