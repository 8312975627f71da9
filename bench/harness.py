"""What the benchmarks share: the reader, a question set, scoring, and the record that each writes."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import string
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from precompute.calibration import use_codec
from precompute.embedded import embedded_model
from precompute.frame import Turn
from precompute.reader import Reader
from serving.blend.assembly import Segment
from storage.codecs.transform import Transform
from storage.errors import UserError
from storage.kvstore import KVStore

MARK = ".preread-bench"


def emptied(folder: Path) -> Path:
    """The folder of a benchmark, with nothing in it; beside it stands a mark that what is there is a benchmark's. Raises
    UserError: nothing else is ever deleted, whatever --workdir says."""
    mark = folder.parent / MARK
    if folder.exists() and not mark.exists():
        raise UserError(f"{folder} was not made by a benchmark, which would empty it: remove it, or choose another --workdir")
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def reader_folder(model: str | None) -> Path:
    """The folder that `--model DIR` names, or the embedded model's."""
    return Path(model) if model else embedded_model()


def load_reader(model: str | None, *, device: str = "cpu", dtype: str = "bfloat16") -> Reader:
    """The reader of that folder. Raises UserError."""
    folder = reader_folder(model)
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is no model folder: config.json is missing")
    reader = Reader(folder, device=device, dtype=dtype)
    if reader.full_prefill_reason:
        raise UserError(f"{folder.name} is served by full prefill only: {reader.full_prefill_reason}")
    return reader


def store_by(reader: Reader, codec: str, stores: Sequence[KVStore]) -> None:
    """Let what `reader` compiles be stored by the codec of this name, whose basis every store has from now on."""
    use_codec(reader, codec, stores[0].codecs)
    found = stores[0].codecs.find(reader.profile.codec)
    if isinstance(found, Transform):
        for store in stores[1:]:
            store.codecs.add(found.basis)


@dataclass(frozen=True)
class Example:
    id: str
    chunks: list[list[int]]
    question: str
    answers: list[str]
    document: str | None = None  # whose chunks these are, if they are of one


def load_examples(path: Path, reader: Reader, limit: int, max_tokens: int) -> list[Example]:
    """Records {"id","chunks","question","answers"}; chunks over `max_tokens` in total are trimmed equally."""
    examples = []
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        record = json.loads(line)
        chunks = trim(reader.tokenizer.encode_batch(record["chunks"]), max_tokens)
        examples.append(Example(str(record["id"]), chunks, record["question"], record["answers"], record.get("document")))
    if not examples:
        raise UserError(f"{path} holds no record")
    return examples


def trim(chunks: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Cut the longest chunks to one common length, the largest that fits `max_tokens` in total."""
    low, high = 1, max(map(len, chunks))
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(len(c), middle) for c in chunks) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return [c[:low] for c in chunks]


def grounded(
    reader: Reader, chunks: Sequence[Sequence[int]], kv: Sequence[torch.Tensor | None], question: str
) -> list[Segment]:
    """frame | (label, chunk)* | question as the product builds it; `kv`: each chunk's stored KV, or None."""
    segments = [Segment("frame", tuple(reader.format.frame))]
    for number, (ids, stored) in enumerate(zip(chunks, kv, strict=True), 1):
        segments += [Segment("label", tuple(reader.format.label(number))), Segment("chunk", tuple(ids), stored)]
    return [*segments, Segment("tail", tuple(reader.format.tail([Turn("user", question)])))]


def drive(work: Generator[None, None, torch.Tensor]) -> torch.Tensor:
    """Run a blending method to its end, without turns for others."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def normalise(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(answer: str, golds: Sequence[str]) -> float:
    """Token F1 against the best gold answer (SQuAD)."""
    return max(_f1(normalise(answer).split(), normalise(g).split()) for g in golds)


def _f1(answer: list[str], gold: list[str]) -> float:
    shared = sum((Counter(answer) & Counter(gold)).values())
    if not shared:
        return float(answer == gold)
    return 2 * shared / (len(answer) + len(gold))


def exact(answer: str, golds: Sequence[str]) -> float:
    return float(any(normalise(answer) == normalise(g) for g in golds))


def machine() -> dict[str, Any]:
    """Where and from which commit a record comes."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
        "threads": torch.get_num_threads(), "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": commit, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def console() -> Console:
    """Where tables go; in a file or a pipe, wide enough for the widest."""
    return Console(width=None if sys.stdout.isatty() else 150)


def write_record(record: dict[str, Any], out: Path | None) -> None:
    """The figures as JSON, with the machine they were taken on."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**record, "machine": machine()}, indent=1) + "\n", encoding="utf-8")
