"""Do our chunks and our search find the passages that answer, at the same number of tokens as other splitters?

Questions come with the gold spans of their documents. Every way of chunking goes through the same embedder, the same
index and the same search (hybrid), and gets the same tokens of the reader's tokenizer: at k, k times `BUDGET`. The
ranking is walked down until they are spent, and the chunk in which that happens is cut there. Characters count once.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from bench.harness import console, reader_folder, write_record
from ingest.chunker import cut
from ingest.parsers import parse
from precompute.tokenizer import ReaderTokenizer
from retrieval.embedder import SentenceEmbedder
from retrieval.index import open_index
from retrieval.search import Retriever
from storage.catalogue.engine import Catalogue, migrate, open_catalogue
from storage.catalogue.schema import ChunkRow, Corpus, Document, Tenant
from storage.errors import UserError
from storage.keys import token_bytes
from storage.types import ParsedDocument, indexed_text

KS = (1, 4, 8, 16)
BUDGET = 200  # tokens of the reader for each k
TENANT, CORPUS = "bench", "vs_bench"
PEER = "langchain_text_splitters"


@dataclass(frozen=True)
class Piece:
    """A chunk as some splitter makes it: a span of the document's text, and what is embedded of it."""

    start: int
    end: int
    indexed: str
    headings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tools:
    tokenizer: ReaderTokenizer
    embedder: SentenceEmbedder


Split = Callable[[ParsedDocument, str, Tools], list[Piece]]


def ours(chunk_tokens: int, headings: bool = True, name: bool = True) -> Split:
    def split(document: ParsedDocument, path: str, tools: Tools) -> list[Piece]:
        limits = {"embedder_tokens": tools.embedder.count_batch, "embedder_limit": tools.embedder.max_tokens}
        chunks = cut(document, tools.tokenizer, max_tokens=chunk_tokens, **limits)  # type: ignore[arg-type]
        return [
            Piece(c.start, c.end, indexed_text(c.text, c.headings if headings else (), path if name else ""), c.headings)
            for c in chunks
        ]

    return split


def named(split: Split) -> Split:
    """The same with what is the product's own doing: the document's name before each part."""

    def split_and_name(document: ParsedDocument, path: str, tools: Tools) -> list[Piece]:
        return [replace(piece, indexed=indexed_text(piece.indexed, (), path)) for piece in split(document, path, tools)]

    return split_and_name


def fixed(tokens: int) -> Split:
    def split(document: ParsedDocument, path: str, tools: Tools) -> list[Piece]:
        from langchain_text_splitters.base import Tokenizer, split_text_on_tokens

        encode, decode = tools.tokenizer.encode, tools.tokenizer.decode
        by = Tokenizer(chunk_overlap=0, tokens_per_chunk=tokens, decode=decode, encode=encode)
        return _spans(document.text, split_text_on_tokens(text=document.text, tokenizer=by))

    return split


def recursive(tokens: int) -> Split:
    def split(document: ParsedDocument, path: str, tools: Tools) -> list[Piece]:
        from langchain_text_splitters import RecursiveCharacterTextSplitter

        def length(text: str) -> int:
            return len(tools.tokenizer.encode(text))

        by = RecursiveCharacterTextSplitter(chunk_size=tokens, chunk_overlap=0, length_function=length)
        return _spans(document.text, by.split_text(document.text))

    return split


def _spans(text: str, parts: Sequence[str]) -> list[Piece]:
    """Where each part stands. One that is not to be found is left out: its characters come as found by nobody."""
    pieces, reached = [], 0
    for part in parts:
        start = text.find(part, reached)
        if start >= 0:
            reached = start + len(part)
            pieces.append(Piece(start, reached, part))
    return pieces


@dataclass(frozen=True)
class Way:
    """A row of the table."""

    split: Split
    neighbours: bool = False
    needs: str = ""  # a package


WAYS: dict[str, Way] = {
    "ours (400, product)": Way(ours(400)),
    "ours, without headings": Way(ours(400, headings=False)),
    "ours, without the file's name": Way(ours(400, name=False)),
    "fixed (200), with the file's name": Way(named(fixed(200)), needs=PEER),
    "recursive (200), with the file's name": Way(named(recursive(200)), needs=PEER),
    "ours, neighbours": Way(ours(400), neighbours=True),
    "ours (200)": Way(ours(200)),
    "ours (100)": Way(ours(100)),
    **{f"fixed ({n})": Way(fixed(n), needs=PEER) for n in (100, 200, 256)},
    **{f"recursive ({n})": Way(recursive(n), needs=PEER) for n in (100, 200, 256)},
}


@dataclass(frozen=True)
class Question:
    text: str
    spans: list[tuple[str, int, int]]


def run(
    *,
    corpus: Path,
    questions: Path,
    out: Path | None,
    workdir: Path,
    model: str | None = None,
    dtype: str = "bfloat16",
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Figures by way of chunking, also those that cannot run, with the reason."""
    workdir.mkdir(parents=True, exist_ok=True)
    tools = Tools(ReaderTokenizer(reader_folder(model)), SentenceEmbedder(dtype=dtype))
    documents = {str(p.relative_to(corpus)): parse(p.read_bytes(), p.name) for p in sorted(corpus.rglob("*")) if p.is_file()}
    asked = _questions(questions, documents)
    record: dict[str, Any] = {"questions": len(asked), "budget_tokens": BUDGET, "ways": {}}
    for name, way in WAYS.items():
        if way.needs and importlib.util.find_spec(way.needs) is None:
            record["ways"][name] = {"reason": f"{way.needs} is not installed: pip install preread[bench]"}
            continue
        with TemporaryDirectory(dir=workdir) as room:
            record["ways"][name] = _measured(Path(room), way, documents, asked, tools)
        progress(f"{name}: {json.dumps(record['ways'][name])}")
    _show(record)
    write_record(record, out)
    return record


def _questions(path: Path, documents: dict[str, ParsedDocument]) -> list[Question]:
    asked = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        spans = [(span["path"], int(span["start"]), int(span["end"])) for span in record["spans"]]
        if any(name not in documents for name, _, _ in spans):
            raise UserError(f"{path} names a document that is not in the corpus")
        asked.append(Question(record["question"], spans))
    if not asked:
        raise UserError(f"{path} holds no question")
    return asked


def _measured(
    room: Path, way: Way, documents: dict[str, ParsedDocument], asked: Sequence[Question], tools: Tools
) -> dict[str, Any]:
    url = f"sqlite:///{room / 'catalogue.db'}"
    migrate(url)
    catalogue = open_catalogue(url)
    index = open_index(catalogue, tools.embedder)
    index.ensure()
    lengths = _fill(catalogue, index, way, documents, tools)
    retriever = Retriever(catalogue, index, tools.embedder)
    at: dict[int, list[tuple[float, float]]] = {k: [] for k in KS}
    for question in asked:
        ranked = [] if way.neighbours else _search(retriever, question, min(500, 1 + 20 * max(KS)))
        for k in KS:
            found = _search(retriever, question, max(1, k // 2), k * BUDGET) if way.neighbours else ranked
            at[k].append(_scores(_within(found, k * BUDGET), question.spans))
    catalogue.close()
    return {
        "chunks": len(lengths),
        "tokens_per_chunk": round(statistics.mean(lengths), 1),
        **{f"recall_{k}": round(statistics.mean(r for r, _ in at[k]), 4) for k in KS},
        **{f"precision_{k}": round(statistics.mean(p for _, p in at[k]), 4) for k in KS},
    }


def _search(
    retriever: Retriever, question: Question, top_k: int, budget: int | None = None
) -> list[tuple[str, int, int, int]]:
    """Path, span and tokens of what is found, best first; with a budget, neighbours fill it."""
    found = retriever.search(
        tenant_id=TENANT, corpus_ids=[CORPUS], query=question.text, top_k=top_k, token_budget=budget,
        neighbours=budget is not None,
    )  # fmt: skip
    return [(chunk.path, chunk.start, chunk.end, len(chunk.token_ids)) for chunk in found]


def _fill(
    catalogue: Catalogue, index: Any, way: Way, documents: dict[str, ParsedDocument], tools: Tools
) -> list[int]:
    """Chunks of all documents in the catalogue and the index; their lengths in tokens."""
    lengths: list[int] = []
    with catalogue.write() as session:
        session.add(Tenant(id=TENANT, name=TENANT, created_at=0.0))
        session.flush()
        of_all = {"id": CORPUS, "tenant_id": TENANT, "name": CORPUS, "sharing_group": TENANT, "attributes": {}}
        session.add(Corpus(**of_all, source=None, created_at=0.0, last_active_at=0.0))
        for number, (path, document) in enumerate(documents.items()):
            owner = {"document_id": f"doc-{number}", "corpus_id": CORPUS, "tenant_id": TENANT}
            session.add(
                Document(
                    id=owner["document_id"], corpus_id=CORPUS, tenant_id=TENANT, file_id="f", path=path, sha256="0" * 64,
                    status="completed", attributes={}, created_at=0.0,
                )
            )  # fmt: skip
            session.flush()
            pieces = way.split(document, path, tools)
            rows = [
                ChunkRow(
                    **owner, ordinal=i, text=document.text[p.start : p.end], start=p.start, end=p.end,
                    token_ids=token_bytes(tools.tokenizer.encode(document.text[p.start : p.end])), headings=list(p.headings),
                    line_start=1, line_end=1,
                )
                for i, p in enumerate(pieces)
            ]  # fmt: skip
            session.add_all(rows)
            session.flush()
            lengths += [len(row.token_ids) // 4 for row in rows]
            texts = [piece.indexed for piece in pieces]
            vectors = tools.embedder.embed(texts)
            index.add(session, CORPUS, [(r.id, v, t) for r, v, t in zip(rows, vectors, texts, strict=True)])
    return lengths


def _within(spans: Sequence[tuple[str, int, int, int]], budget: int) -> list[tuple[str, int, int]]:
    """Down the ranking until the tokens are spent; the last span is cut in proportion."""
    kept = []
    for path, start, end, tokens in spans:
        if budget <= 0:
            break
        share = min(1.0, budget / max(1, tokens))
        kept.append((path, start, start + round(share * (end - start))))
        budget -= tokens
    return kept


def _scores(found: Sequence[tuple[str, int, int]], gold: Sequence[tuple[str, int, int]]) -> tuple[float, float]:
    """Recall and precision of characters."""
    got = {(path, i) for path, start, end in found for i in range(start, end)}
    wanted = {(path, i) for path, start, end in gold for i in range(start, end)}
    return len(got & wanted) / len(wanted), len(got & wanted) / max(1, len(got))


def _show(record: dict[str, Any]) -> None:
    title = f"{record['questions']} questions, k x {record['budget_tokens']} tokens: recall / precision of gold characters, %"
    table = Table(title=title, title_justify="left")
    for name in ("chunks", "number", "tokens", *(f"k = {k}" for k in KS)):
        table.add_column(name, justify="left" if name == "chunks" else "right")
    for name, way in record["ways"].items():
        if "reason" in way:
            table.add_row(name, way["reason"])
            continue
        cells = [f"{100 * way[f'recall_{k}']:.1f} / {100 * way[f'precision_{k}']:.1f}" for k in KS]
        table.add_row(name, str(way["chunks"]), str(way["tokens_per_chunk"]), *cells)
    console().print(table)
