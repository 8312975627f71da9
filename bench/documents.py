"""Documents to read fast: files of each kind, of words drawn as often as they stand in the samples."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
PDF_PAGES = 20


@dataclass(frozen=True)
class Author:
    """Writes in the words of the samples. `names` are identifiers: code repeats its own."""

    rng: random.Random
    vocabulary: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, seed: int) -> Author:
        rng = random.Random(seed)
        texts = (file.read_text("utf-8") for file in sorted(SAMPLES.glob("*/*")) if file.suffix in {".md", ".txt"})
        words = tuple(word for text in texts for word in text.split() if word.isascii() and word[-1].isalnum())
        plain = sorted({word.lower() for word in words if word.isidentifier()})
        return cls(rng, words, tuple("_".join(rng.choices(plain, k=2)) for _ in range(800)))

    def words(self, count: int) -> str:
        return " ".join(self.rng.choices(self.vocabulary, k=count))

    def name(self) -> str:
        return self.rng.choice(self.names)

    def paragraph(self) -> str:
        sentences = range(self.rng.randint(1, 5))
        return ". ".join(self.words(self.rng.randint(6, 24)).capitalize() for _ in sentences) + "."


def generated(megabytes: float, seed: int = 0) -> Iterator[tuple[bytes, str]]:
    """Content and name of files of each kind, `megabytes` of it each. PDFs only where
    fpdf2 is installed: one of twenty pages for each megabyte."""
    author = Author.of(seed)
    for suffix, write in _WRITERS.items():
        written = 0
        while written < megabytes * 1e6:
            data = write(author).encode()
            written += len(data)
            yield data, f"sample.{suffix}"
    if importlib.util.find_spec("fpdf") is not None:
        for _ in range(max(1, int(megabytes))):
            yield _pdf(author), "sample.pdf"


def _prose(author: Author) -> str:
    return "\n\n".join(author.paragraph() for _ in range(300))


def _markdown(author: Author) -> str:
    sections = range(60)
    return "\n\n".join(f"## {author.words(4)}\n\n{author.paragraph()}\n\n{author.paragraph()}" for _ in sections)


def _html(author: Author) -> str:
    items = range(150)
    body = "".join(f"<h2>{author.words(4)}</h2><p>{author.paragraph()}</p><ul><li>{author.words(9)}</li></ul>" for _ in items)
    return f"<!DOCTYPE html><html><body>{body}</body></html>"


def _csv(author: Author) -> str:
    file = io.StringIO()
    rows = [[n, author.name(), author.words(12), n * 7] for n in range(1500)]
    csv.writer(file).writerows([["id", "name", "note", "amount"], *rows])
    return file.getvalue()


def _records(author: Author) -> list[dict[str, Any]]:
    return [{"id": n, "name": author.name(), "note": author.words(12), "tags": [author.name()]} for n in range(800)]


def _json(author: Author) -> str:
    return json.dumps(_records(author), indent=1)


def _yaml(author: Author) -> str:
    return "".join(f"- id: {row['id']}\n  name: {row['name']}\n  note: {json.dumps(row['note'])}\n" for row in _records(author))


def _xml(author: Author) -> str:
    rows = (f'<e id="{row["id"]}"><a>{row["name"]}</a><b>{escape(row["note"])}</b></e>' for row in _records(author))
    return "<r>\n" + "\n".join(rows) + "\n</r>"


def _python(author: Author) -> str:
    def method() -> str:
        lines = (f"        {author.name()} = self.{author.name()}({author.name()}, {n})\n" for n in range(8))
        return f'    def {author.name()}(self) -> None:\n        """{author.words(8)}"""\n{"".join(lines)}'

    return "\n\n".join(f"class C{n}:\n" + "\n".join(method() for _ in range(6)) for n in range(25))


def _notebook(author: Author) -> str:
    kinds = ("markdown", "code") * 100
    cells = [{"cell_type": kind, "source": author.paragraph(), "outputs": [{"text": author.words(30)}]} for kind in kinds]
    return json.dumps({"nbformat": 4, "cells": cells})


def _pdf(author: Author) -> bytes:
    from fpdf import FPDF

    pdf = FPDF()
    pdf.set_font("Helvetica", size=10)
    for _ in range(PDF_PAGES):
        pdf.add_page()
        pdf.multi_cell(0, 5, author.words(450))
    return bytes(pdf.output())


_WRITERS: dict[str, Callable[[Author], str]] = {
    "txt": _prose, "md": _markdown, "html": _html, "csv": _csv, "json": _json, "py": _python, "yaml": _yaml, "xml": _xml,
    "ipynb": _notebook,
}  # fmt: skip
