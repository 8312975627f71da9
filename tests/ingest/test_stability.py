"""An edit changes the chunks it touches: in a contract of 300 pages, in prose without a heading, in code, in data; in a file
of its own text as in one that is written as text, and where each page of it begins elsewhere than before."""

from __future__ import annotations

import functools
import html
import json
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence

import docx
import pytest
from ingest_tokens import PlainTokenizer, check_cover
from office_kit import saved
from pdf_kit import STEP, put, sheet, written

from ingest.chunker import cut
from ingest.parsers import parse
from storage.types import Chunk

PLAIN = PlainTokenizer()
PAGE = 3000  # characters
WORDS = (
    "party shall notice agreement supplier fee delivery term breach liability services data written days law "
    "court claim damages insurance audit records payment invoice interest tax schedule order goods warranty"
).split()
NUMERALS = "零一二三四五六七八九十"
FORMS = {
    "1.": (lambda n, title: f"{n}. {title}", lambda n, m: f"{n}.{m} "),
    "Article": (lambda n, title: f"Article {n} {title}", lambda n, m: f"({m}) "),
    "§": (lambda n, title: f"§ {n} {title}", lambda n, m: f"({m}) "),
    "第": (lambda n, title: f"第{chinese(n)}条 保密", lambda n, m: ""),
}  # fmt: skip
ADDED = "This paragraph was added on the day of signing and says little."


def chinese(number: int) -> str:
    return "".join(NUMERALS[int(digit)] for digit in str(number))


def sentence(rng: random.Random, low: int = 8, high: int = 30) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high))).capitalize() + "."


def paragraph(rng: random.Random) -> str:
    return " ".join(sentence(rng) for _ in range(rng.randint(1, 5)))


@functools.cache
def contract(form: str, pages: int = 300) -> tuple[str, int, int]:
    """A numbered contract, how many clauses have a heading, and how many lines begin with a cross-reference."""
    rng = random.Random(form)
    heading, clause = FORMS[form]
    parts, length, number, references = ["MASTER AGREEMENT"], 0, 0, 0
    while length < pages * PAGE:
        number += 1
        parts.append(heading(number, " ".join(rng.choices(WORDS, k=3)).title()))
        # One clause in seventeen is a long one: more than a dozen chunks without a heading.
        for item in range(1, 60 if number % 17 == 0 else rng.randint(3, 9)):
            parts.append(clause(number, item) + paragraph(rng))
            length += len(parts[-1])
        if number % 3 == 0:
            references += 1
            other = rng.randint(1, number)
            parts.append(rng.choice([
                f"Section {other}.2 shall apply to all claims under this part.",
                f"The cap is the one that is named in\nArticle {other} Fees of this agreement and in\n§ {other} of the annex.",
                f"第{chinese(other)}条规定的情形除外。",
            ]))  # fmt: skip
    return "\n\n".join(parts) + "\n", number, references


def chunks_of(data: bytes, name: str) -> list[Chunk]:
    document = parse(data, name)
    chunks = cut(document, PLAIN, max_tokens=300)
    check_cover(document, chunks)
    return chunks


def changed(before: str, after: str, name: str, write: Callable[[str], bytes] = str.encode) -> tuple[int, int]:
    """How many of the chunks of the edited text are new, and how many there are."""
    old = {chunk.token_ids for chunk in chunks_of(write(before), name)}
    new = chunks_of(write(after), name)
    return sum(chunk.token_ids not in old for chunk in new), len(new)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["contract.txt", "contract.md"])
def test_a_contract_of_300_pages_has_its_clauses_as_headings_and_no_cross_references(form: str, name: str) -> None:
    text, clauses, references = contract(form)
    document = parse(text.encode(), name)
    headings = [text[block.start : block.end] for block in document.blocks if block.kind == "heading"]
    assert references > 50
    assert len([heading for heading in headings if heading != "MASTER AGREEMENT"]) == clauses
    assert not any("shall apply" in heading or "Fees" in heading or "规定" in heading for heading in headings)


@pytest.mark.parametrize(("form", "place"), [("1.", 0.0), ("Article", 0.5), ("第", 0.5), ("§", 0.0)])
def test_a_paragraph_added_to_it_changes_only_the_chunks_it_touches(form: str, place: float) -> None:
    text, _, _ = contract(form)
    at = text.find("\n\n", int(len(text) * place)) + 2 if place else 0
    new, count = changed(text, f"{text[:at]}{ADDED}\n\n{text[at:]}", "contract.txt")
    assert count > 800
    assert new <= 4


def is_heading(part: str) -> bool:
    return len(part) < 60 and part[-1].isalpha()


def as_html(text: str) -> bytes:
    tags = ((("h2" if is_heading(part) else "p"), html.escape(part)) for part in text.strip().split("\n\n"))
    return ("<!doctype html><title>t</title>" + "".join(f"<{tag}>{part}</{tag}>" for tag, part in tags)).encode()


def as_docx(text: str) -> bytes:
    document = docx.Document()
    heading, body = document.styles["Heading 1"], document.styles["Normal"]
    for part in text.strip().split("\n\n"):
        document.add_paragraph(part, heading if is_heading(part) else body)
    return saved(document)


class Pages:
    """A PDF in the making, with a running head, page numbers, and as many columns as it is given the left edges of."""

    def __init__(self, lefts: Sequence[int]) -> None:
        self.pdf, self.lefts = sheet(), lefts
        self.column, self.y = len(lefts), 0

    def line(self, text: str, size: int) -> None:
        """Put a line below the last one, or at the top of the next column or page."""
        if self.column == len(self.lefts) or self.y > 770:
            self.column, self.y = self.column + 1, 90
        if self.column >= len(self.lefts):
            self.column = 0
            self.pdf.add_page()
            put(self.pdf, 50, 40, "Master Agreement, confidential", 8)
            put(self.pdf, 290, 815, f"Page {self.pdf.page_no()}", 8)
        put(self.pdf, self.lefts[self.column], self.y, text, size)
        self.y += STEP


def as_pdf(text: str, lefts: Sequence[int] = (50,), width: int = 96) -> bytes:
    pages = Pages(lefts)
    for part in text.encode("latin-1", "ignore").decode("latin-1").strip().split("\n\n"):
        for line in textwrap.wrap(part, width):
            pages.line(line, 14 if is_heading(part) else 10)
        pages.y += 8
    return written(pages.pdf)


def in_two_columns(text: str) -> bytes:
    return as_pdf(text, (50, 310), 46)


WRITERS: Mapping[str, Callable[[str], bytes]] = {
    "contract.html": as_html, "contract.docx": as_docx, "contract.pdf": as_pdf, "columns.pdf": in_two_columns,
}  # fmt: skip


@pytest.mark.parametrize(("name", "place"), [
    ("contract.html", 0.0), ("contract.docx", 0.0), ("contract.pdf", 0.0),
    *(pytest.param(name, place, marks=pytest.mark.slow) for name, place in [("contract.pdf", 0.5), ("columns.pdf", 0.0)]),
])  # fmt: skip
def test_a_paragraph_added_to_a_page_or_an_office_file_changes_only_the_chunks_it_touches(name: str, place: float) -> None:
    text, _, _ = contract("1.")
    at = text.find("\n\n", int(len(text) * place)) + 2
    new, count = changed(text, f"{text[:at]}{ADDED}\n\n{text[at:]}", name, WRITERS[name])
    assert count > 800
    assert new <= 4


def test_a_paragraph_before_a_pdf_of_150_pages_without_a_heading_changes_few_chunks() -> None:
    rng = random.Random(5)
    text = "\n\n".join(paragraph(rng) for _ in range(1_000))
    new, count = changed(text, f"{ADDED}\n\n{text}", "prose.pdf", as_pdf)
    assert count > 100
    assert new <= 6


def test_a_paragraph_before_900_kb_of_prose_without_a_heading_changes_few_chunks() -> None:
    rng = random.Random(1)
    text = "\n\n".join(paragraph(rng) for _ in range(2_000))
    new, count = changed(text, f"{ADDED}\n\n{text}", "prose.txt")
    assert count > 200
    assert new <= 6


def test_a_sentence_before_a_line_of_half_a_megabyte_changes_few_chunks() -> None:
    rng = random.Random(2)
    text = " ".join(sentence(rng) for _ in range(4_000))
    new, count = changed(text, f"{ADDED} {text}", "line.txt")
    assert count > 200
    assert new <= 6


def python(lines: int) -> str:
    rng = random.Random(3)
    written = ["import os", ""]
    while len(written) < lines:
        written.append(f"class Class{len(written)}:")
        for _ in range(rng.randint(1, 12)):
            written.append(f"    def {rng.choice(WORDS)}_{len(written)}(self, a):")
            for _ in range(rng.randint(2, 30)):
                written.append(f"        {rng.choice(WORDS)} = self.{rng.choice(WORDS)}(a, {rng.randint(0, 999)})")
            written.append("")
    return "\n".join(written)


@pytest.mark.parametrize("added", ["import sys\n", "    def added(self):\n        return 1\n\n", "        added = 1\n"])
def test_a_line_or_a_method_added_to_10_000_lines_of_code_changes_few_chunks(added: str) -> None:
    text = python(10_000)
    before = {"i": "import os", " ": "    def "}[added[0]]
    at = text.find(before, len(text) // 2 if added[0] == " " else 0)
    at = text.find("\n", at) + 1 if "added = 1" in added else at
    new, count = changed(text, text[:at] + added + text[at:], "big.py")
    assert count > 500
    assert new <= 3


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows.jsonl", "rows.yaml"])
def test_a_record_added_before_4_000_others_changes_few_chunks(name: str) -> None:
    rng = random.Random(4)
    rows = [{"id": n, "note": sentence(rng)} for n in range(4_000)]
    more = [{"id": "new", "note": "added"}, *rows]
    write = {
        "rows.csv": lambda rows: "id,note\n" + "".join(f"{row['id']},{row['note']}\n" for row in rows),
        "rows.json": lambda rows: json.dumps(rows, indent=1),
        "rows.jsonl": lambda rows: "\n".join(map(json.dumps, rows)),
        "rows.yaml": lambda rows: "".join(f"- id: {row['id']}\n  note: {row['note']}\n" for row in rows),
    }[name]
    new, count = changed(write(rows), write(more), name)
    assert count > 300
    assert new <= 5
