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
    """Content and name of files of each kind, `megabytes` of it each. PDFs and office files only where what writes them is
    installed: one for each megabyte, of twenty pages, of sixty sections, of forty slides, of 1,500 rows."""
    author = Author.of(seed)
    for suffix, write in _WRITERS.items():
        written = 0
        while written < megabytes * 1e6:
            data = write(author).encode()
            written += len(data)
            yield data, f"sample.{suffix}"
    for suffix, (package, make) in _MADE_BY.items():
        for _ in range(max(1, int(megabytes)) if importlib.util.find_spec(package) is not None else 0):
            yield make(author), f"sample.{suffix}"


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


def _toml(author: Author) -> str:
    def table(row: dict[str, Any]) -> str:
        return f"[{row['name']}_{row['id']}]\nnote = {json.dumps(row['note'])}\ntags = {json.dumps(row['tags'])}\n"

    return "\n".join(map(table, _records(author)))


def _ini(author: Author) -> str:
    rows = _records(author)
    return "".join(f"[{row['name']} {row['id']}]\nnote = {row['note']}\ntag = {row['tags'][0]}\n\n" for row in rows)


def _docx(author: Author) -> bytes:
    import docx

    document = docx.Document()
    for _ in range(60):
        document.add_heading(author.words(4), 2)
        document.add_paragraph(author.paragraph())
        document.add_paragraph(author.paragraph())
    return _saved(document)


def _pptx(author: Author) -> bytes:
    import pptx

    deck = pptx.Presentation()
    for _ in range(40):
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text = author.words(4)
        slide.placeholders[1].text = "\n".join(author.words(9) for _ in range(6))
    return _saved(deck)


def _xlsx(author: Author) -> bytes:
    import openpyxl

    book = openpyxl.Workbook()
    for row in [["id", "name", "note", "amount"], *([n, author.name(), author.words(12), n * 7] for n in range(1500))]:
        book.active.append(row)
    return _saved(book)


def _saved(document: Any) -> bytes:
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


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
    "ipynb": _notebook, "toml": _toml, "ini": _ini,
}  # fmt: skip
_MADE_BY: dict[str, tuple[str, Callable[[Author], bytes]]] = {
    "pdf": ("fpdf", _pdf), "docx": ("docx", _docx), "pptx": ("pptx", _pptx), "xlsx": ("openpyxl", _xlsx),
}  # fmt: skip
