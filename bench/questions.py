"""The benchmarks' own questions: those of `samples/questions.jsonl`, each over the pieces of its document and of others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.harness import Example, trim
from precompute.reader import Reader

SAMPLES = Path(__file__).parents[1] / "samples"
PIECE = 700  # characters, about as long as a passage of a search engine
PIECES = 12


def own_examples(reader: Reader, limit: int, max_tokens: int) -> list[Example]:
    """Questions whose documents are plain text. Pieces of other documents stand around those of the right one."""
    texts = {str(p.relative_to(SAMPLES)): _pieces(p) for p in sorted(SAMPLES.rglob("*")) if p.suffix in (".md", ".txt")}
    records = [json.loads(line) for line in (SAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    examples = []
    for record in records:
        if (own := texts.get(record["document"])) is None:
            continue
        others = [piece for name, pieces in texts.items() if name != record["document"] for piece in pieces]
        chunks = _around(own[:PIECES], others[: max(0, PIECES - len(own))])
        ids = trim(reader.tokenizer.encode_batch(chunks), max_tokens)
        examples.append(Example(record["id"], ids, record["question"], record["answers"]))
    return examples[:limit]


def _pieces(path: Path) -> list[str]:
    """A document's paragraphs, put together up to about PIECE characters."""
    pieces = [""]
    for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
        if pieces[-1] and len(pieces[-1]) + len(paragraph) > PIECE:
            pieces.append("")
        pieces[-1] += paragraph.strip() + "\n"
    return [piece for piece in pieces if piece.strip()]


def _around(own: Sequence[str], others: Sequence[str]) -> list[str]:
    half = len(others) // 2
    return [*others[:half], *own, *others[half:]]
