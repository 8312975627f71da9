"""How fast are files read and cut, by parser and stage, beside the reader's tokenizer alone on the same text?

Seconds of CPU in this process, so that a busy machine counts little. Stages: `detect` says which parser, `parse`
decodes and finds the structure, `cut` makes the chunks with their exact token ids and within the embedder's limit; of that
`tokenise` is what both tokenizers take, and `chunk` the rest. The stage that takes most is the limit.
`tokenizer` is one plain pass of the reader's tokenizer over the documents in windows of 8,192 characters: what
exact token ids would cost without any chunking. Files are read in turn, each once, after the first one, which pays for what
a process sets up once: what a tokenizer remembers of words it has from the files before.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from bench.documents import generated
from bench.harness import console, reader_folder, write_record
from ingest.chunker import cut
from ingest.detect import detect
from ingest.parsers import PARSERS
from precompute.tokenizer import ReaderTokenizer
from retrieval.embedder import SentenceEmbedder
from storage.errors import FileError, UserError
from storage.types import Chunk, ParsedDocument

Given = TypeVar("Given")
Found = TypeVar("Found")
WINDOW = 8192  # characters
CHUNK_TOKENS = 400  # the product's default
HOTTEST = 12  # functions of the profile


@dataclass
class Stages:
    """Of one parser's files: their number, bytes, pages and characters of text, and CPU seconds by stage."""

    files: int = 0
    bytes: int = 0
    pages: int = 0
    characters: int = 0
    chunks: int = 0
    detect: float = 0.0
    parse: float = 0.0
    cut: float = 0.0
    tokenise: float = 0.0
    tokenizer: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Rates in MB of file a second of a core; `share_of_tokenizer`: all stages' rate against the tokenizer's."""
        seconds = {"detect": self.detect, "parse": self.parse, "cut": self.cut, "tokenizer": self.tokenizer}
        seconds["all"] = self.detect + self.parse + self.cut
        stages = {"detect": self.detect, "parse": self.parse, "chunk": self.cut - self.tokenise, "tokenise": self.tokenise}
        shares = {f"{stage}_share": spent / max(seconds["all"], 1e-9) for stage, spent in stages.items()}
        text = self.characters / 1e6 / max(seconds["all"], 1e-9)
        rates = {f"{stage}_mb_s": self.bytes / 1e6 / max(spent, 1e-9) for stage, spent in seconds.items()}
        pages = self.pages / max(self.parse, 1e-9) if self.pages else None
        limit = max(stages, key=lambda stage: stages[stage])
        of_all = {"limit": limit, "text_mb_s": text, "pages_s": pages, "share_of_tokenizer": self.tokenizer / seconds["all"]}
        return {**asdict(self), **rates, **shares, **of_all}


@dataclass
class _Chunker:
    """Cuts as the product does. `spent`: seconds in both tokenizers, of the last document."""

    tokenizer: ReaderTokenizer
    embedder: SentenceEmbedder
    spent: float = 0.0

    def __call__(self, document: ParsedDocument) -> Sequence[Chunk]:
        count, limit, self.spent = self._timed(self.embedder.count_batch), self.embedder.max_tokens, 0.0
        return cut(document, self, max_tokens=CHUNK_TOKENS, embedder_tokens=count, embedder_limit=limit)

    def encode(self, text: str) -> list[int]:
        return self._timed(self.tokenizer.encode)(text)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return self._timed(self.tokenizer.encode_batch)(texts)

    def count_batch(self, texts: Sequence[str]) -> Sequence[int]:
        return self._timed(self.tokenizer.count_batch)(texts)

    def _timed(self, work: Callable[[Given], Found]) -> Callable[[Given], Found]:
        def timed(given: Given) -> Found:
            begun = time.process_time()
            result = work(given)
            self.spent += time.process_time() - begun
            return result

        return timed


def run(*, path: Path | None, megabytes: float, out: Path | None, workdir: Path, model: str | None) -> dict[str, Any]:
    """Read a folder, or generated files of each kind; the figures by parser, which are also written to `out`."""
    chunker = _Chunker(ReaderTokenizer(reader_folder(model)), SentenceEmbedder())
    files = list(_of_folder(path) if path is not None else generated(megabytes))
    for data, name in files[:1]:
        _measure(defaultdict(Stages), data, name, chunker)
    stages: dict[str, Stages] = defaultdict(Stages)
    refused = sum(not _measure(stages, data, name, chunker) for data, name in files)
    if not stages:
        raise UserError(f"{path} holds no file that can be read")
    profile = cProfile.Profile()
    profile.runcall(lambda: [_measure(defaultdict(Stages), data, name, chunker) for data, name in files[::4]])
    parsers = {name: stage.figures() for name, stage in sorted(stages.items())}
    record = {"parsers": parsers, "refused_files": refused, "chunk_tokens": CHUNK_TOKENS, "profile": _hottest(profile)}
    _show(record)
    write_record(record, out)
    return record


def _of_folder(path: Path) -> Iterator[tuple[bytes, str]]:
    for file in sorted(path.rglob("*")):
        if file.is_file() and not file.is_symlink():
            yield file.read_bytes(), file.relative_to(path).as_posix()


def _measure(stages: dict[str, Stages], data: bytes, name: str, chunker: _Chunker) -> bool:
    """Add one file to its parser's figures; False if it is not read."""
    try:
        parser, detected = _timed(lambda: detect(data, name))
        document, parsed = _timed(lambda: PARSERS[parser].parse(data, name))
    except FileError:
        return False
    chunks, chunked = _timed(lambda: chunker(document))
    windows = [document.text[at : at + WINDOW] for at in range(0, len(document.text), WINDOW)]
    _, alone = _timed(lambda: chunker.tokenizer.encode_batch(windows))
    stage = stages[parser]
    stage.files += 1
    stage.bytes += len(data)
    stage.pages += max((anchor.page or 0 for anchor in document.anchors), default=0)
    stage.characters += len(document.text)
    stage.chunks += len(chunks)
    stage.detect += detected
    stage.parse += parsed
    stage.cut += chunked
    stage.tokenise += chunker.spent
    stage.tokenizer += alone
    return True


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.process_time()
    result = work()
    return result, time.process_time() - begun


def _hottest(profile: cProfile.Profile) -> list[dict[str, Any]]:
    """The functions that most time is spent in, by share of it."""
    rows: dict[tuple[str, int, str], tuple[Any, ...]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(row[2] for row in rows.values())
    hottest = sorted(rows.items(), key=lambda item: -item[1][2])[:HOTTEST]
    return [{"function": f"{Path(where[0]).name}:{where[2]}", "share": row[2] / total} for where, row in hottest]


def _show(record: dict[str, Any]) -> None:
    table = Table(title="MB a second of one core")
    table.add_column("parser")
    shares = ("detect", "parse", "chunk", "tokenise")
    columns = ("files", "MB", "detect", "parse", "cut", "all", "text", "tokenizer alone", "pages/s")
    for column in (*columns, *(f"{share} %" for share in shares), "limit"):
        table.add_column(column, justify="right")
    for name, row in record["parsers"].items():
        rates = (f"{row[f'{stage}_mb_s']:,.1f}" for stage in ("detect", "parse", "cut", "all", "text", "tokenizer"))
        pages = f"{row['pages_s']:,.0f}" if row["pages_s"] else ""
        parts = (f"{100 * row[f'{share}_share']:.0f}" for share in shares)
        table.add_row(name, str(row["files"]), f"{row['bytes'] / 1e6:.1f}", *rates, pages, *parts, row["limit"])
    console().print(table)
    console().print("profile, the tokenizer alone included:")
    console().print(", ".join(f"{row['function']} {row['share']:.0%}" for row in record["profile"]), markup=False)
