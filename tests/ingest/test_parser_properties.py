"""What holds for every parser, over generated documents made by the libraries that write the formats."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from email.message import EmailMessage

import docx
import openpyxl
import pptx
import pytest
import yaml
from fpdf import FPDF
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ingest_tokens import PlainTokenizer, check_cover
from office_kit import check_blocks, saved
from pptx.util import Inches

from ingest.chunker import cut
from ingest.parser_child import document_of, document_to
from ingest.parsers import PARSERS, parse
from storage.types import ParsedDocument

PLAIN = PlainTokenizer()
# A document: headings, paragraphs, and tables of equal rows. Each text has a word of its own, so that none goes unseen.
Element = tuple[str, Sequence[Sequence[str]]]
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), max_size=60)


def marked(elements: Sequence[tuple[str, list[list[str]]]]) -> list[Element]:
    found: list[Element] = []
    count = 0
    for kind, rows in elements:
        width = len(rows[0])
        cells = []
        for row in rows:
            cells.append([f"w{count + place}x {text}" for place, text in enumerate((row * width)[:width])])
            count += width
        found.append((kind, cells))
    return found


TABLES = st.tuples(st.just("table"), st.lists(st.lists(WORDS, min_size=2, max_size=4), min_size=1, max_size=8))
LINES = st.tuples(
    st.sampled_from(["heading", "paragraph"]), st.lists(st.lists(WORDS, min_size=1, max_size=1), min_size=1, max_size=1)
)
DOCUMENTS = st.lists(LINES | TABLES, min_size=1, max_size=12).map(marked)


def as_docx(elements: Sequence[Element]) -> bytes:
    document = docx.Document()
    for kind, rows in elements:
        if kind == "table":
            table = document.add_table(len(rows), len(rows[0]))
            for row, texts in zip(table.rows, rows, strict=True):
                for cell, text in zip(row.cells, texts, strict=True):
                    cell.text = text
        elif kind == "heading":
            document.add_heading(rows[0][0], 1)
        else:
            document.add_paragraph(rows[0][0])
    return saved(document)


def as_pptx(elements: Sequence[Element]) -> bytes:
    deck = pptx.Presentation()
    for kind, rows in elements:
        slide = deck.slides.add_slide(deck.slide_layouts[5])
        if kind == "heading":
            slide.shapes.title.text = rows[0][0]
        elif kind == "paragraph":
            slide.shapes.add_textbox(0, 0, Inches(1), Inches(1)).text_frame.text = rows[0][0]
        else:
            table = slide.shapes.add_table(len(rows), len(rows[0]), 0, 0, Inches(4), Inches(3)).table
            for row, texts in zip(table.rows, rows, strict=True):
                for cell, text in zip(row.cells, texts, strict=True):
                    cell.text = text
    return saved(deck)


def as_xlsx(elements: Sequence[Element]) -> bytes:
    book = openpyxl.Workbook()
    for _, rows in elements:
        for row in rows:
            book.active.append(list(row))
        book.active.append([])
    return saved(book)


def as_pdf(elements: Sequence[Element]) -> bytes:
    pdf = FPDF()
    pdf.set_font("helvetica", size=10)
    pdf.add_page()
    for kind, rows in elements:
        for row in rows:
            line = " ".join(row).encode("ascii", "ignore").decode().replace("-", "")  # one at a line's end joins two words
            pdf.set_font_size(16 if kind == "heading" else 10)
            pdf.multi_cell(0, text=line, new_x="LMARGIN", new_y="NEXT")
    return bytes(pdf.output())


def as_html(elements: Sequence[Element]) -> bytes:
    parts = ["<!doctype html><title>t</title>"]
    for kind, rows in elements:
        if kind == "table":
            cells = ("".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows)
            parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
        else:
            tag = "h2" if kind == "heading" else "p"
            parts.append(f"<{tag}>{html.escape(rows[0][0])}</{tag}>")
    return "".join(parts).encode()


def as_markdown(elements: Sequence[Element]) -> bytes:
    parts: list[str] = []
    for kind, rows in elements:
        if kind == "table":
            lines = ["| " + " | ".join(text.replace("|", "") for text in row) + " |" for row in rows]
            parts.append("\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]))
        else:
            parts.append("# " * (kind == "heading") + rows[0][0])
    return "\n\n".join(parts).encode()


def as_text(elements: Sequence[Element]) -> bytes:
    return "\n\n".join("\n".join(" ".join(row) for row in rows) for _, rows in elements).encode()


def as_code(elements: Sequence[Element]) -> bytes:
    return "\n".join(
        f"def f{n}():\n    return {[list(row) for row in rows]!r}\n" for n, (_, rows) in enumerate(elements)
    ).encode()


def rows_of(elements: Sequence[Element]) -> list[list[str]]:
    return [list(row) for _, rows in elements for row in rows]


def as_csv(elements: Sequence[Element]) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows(rows_of(elements))
    return out.getvalue().encode()


def as_json(elements: Sequence[Element]) -> bytes:
    return json.dumps([{"kind": kind, "rows": rows} for kind, rows in elements], ensure_ascii=False, indent=1).encode()


def as_yaml(elements: Sequence[Element]) -> bytes:
    return yaml.safe_dump({f"part {n}": row for n, row in enumerate(rows_of(elements))}, allow_unicode=True).encode()


def as_toml(elements: Sequence[Element]) -> bytes:
    tables = (f"[part{n}]\nrow = {json.dumps(row)}\n" for n, row in enumerate(rows_of(elements)))
    return "\n".join(tables).encode()


def as_ini(elements: Sequence[Element]) -> bytes:
    sections = (
        f"[part {n}]\n" + "\n".join(f"k{m} = {text}" for m, text in enumerate(row)) for n, row in enumerate(rows_of(elements))
    )
    return "\n\n".join(sections).encode()


def as_xml(elements: Sequence[Element]) -> bytes:
    rows = ("".join(f"<c>{html.escape(text)}</c>" for text in row) for row in rows_of(elements))
    return f"<?xml version='1.0'?><d>{''.join(f'<r>{row}</r>' for row in rows)}</d>".encode()


def as_notebook(elements: Sequence[Element]) -> bytes:
    cells = [{"cell_type": "markdown", "metadata": {}, "source": [" ".join(row)]} for row in rows_of(elements)]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def as_email(elements: Sequence[Element]) -> bytes:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "a@example.org", "b@example.org", "Documents"
    message.set_content(as_text(elements[:1]).decode())
    for maker, name in ((as_docx, "a.docx"), (as_xlsx, "a.xlsx")):
        message.add_attachment(maker(elements[1:]), maintype="application", subtype="octet-stream", filename=name)
    return message.as_bytes()


MAKERS: Mapping[str, tuple[Callable[[Sequence[Element]], bytes], str]] = {
    "docx": (as_docx, "a"), "pptx": (as_pptx, "a"), "xlsx": (as_xlsx, "a"), "pdf": (as_pdf, "a"), "html": (as_html, "a"),
    "csv": (as_csv, "a.csv"), "json": (as_json, "a"), "yaml": (as_yaml, "a.yaml"), "toml": (as_toml, "a.toml"),
    "ini": (as_ini, "a.ini"), "xml": (as_xml, "a"), "notebook": (as_notebook, "a"), "markdown": (as_markdown, "a.md"),
    "text": (as_text, "a.txt"), "code": (as_code, "a.py"), "email": (as_email, "a"),
}  # fmt: skip


def test_every_parser_is_among_these() -> None:
    assert set(MAKERS) == set(PARSERS)


def made(kind: str, elements: Sequence[Element]) -> ParsedDocument:
    maker, name = MAKERS[kind]
    data = maker(elements)
    document = parse(data, name)
    assert document == parse(data, name)
    return document


@pytest.mark.parametrize("kind", sorted(MAKERS))
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@example([("table", [["w0x ", "w1x A-"]]), ("heading", [["w2x "]])], 16)
@given(DOCUMENTS, st.integers(16, 80))
def test_chunks_cover_every_character_once_and_every_text_is_there(kind: str, elements: list[Element], limit: int) -> None:
    document = made(kind, elements)
    check_blocks(document)
    chunks = cut(document, PLAIN, max_tokens=limit)
    check_cover(document, chunks)
    assert all(len(chunk.token_ids) <= limit for chunk in chunks)
    expected = {word for _, rows in elements for row in rows for text in row for word in re.findall(r"w\d+x", text)[:1]}
    assert expected <= set(re.findall(r"w\d+x", document.text))
    if kind in {"docx", "pptx", "xlsx", "pdf", "html"}:
        assert all(len(re.findall(rf"\b{word}\b", document.text)) == 1 for word in expected)


@pytest.mark.parametrize("kind", sorted(MAKERS))
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_a_document_crosses_the_pipe_unchanged(kind: str, elements: list[Element]) -> None:
    document = made(kind, elements)
    assert document_of(document_to(document)) == document


@pytest.mark.parametrize("kind", ["docx", "pptx", "xlsx", "html", "markdown"])
def test_rows_of_sixty_are_never_cut_and_the_header_is_known(kind: str) -> None:
    rows = [["item", "what it is", "price"], *([f"thing{n}", f"made of part {n}", f"{n * 7} EUR"] for n in range(60))]
    document = made(kind, [("table", rows)])
    chunks = cut(document, PLAIN, max_tokens=150)
    check_cover(document, chunks)
    assert len(chunks) >= 3
    for n in range(60):
        holders = [chunk for chunk in chunks if f"thing{n} " in chunk.text]
        assert len(holders) == 1
        assert f"{n * 7} EUR" in holders[0].text.split(f"thing{n} ")[1].split("\n")[0]
    (table,) = (block for block in document.blocks if block.kind == "table")
    assert "item" in table.header or kind == "html"  # whose cells are not marked as a header here


@pytest.mark.parametrize("kind", ["docx", "pptx", "xlsx", "pdf", "email"])
def test_control_markers_come_through_unchanged(kind: str) -> None:
    marks = "<|im_end|> <|im_start|>system [INST] <<SYS>> </s> <|eot_id|>"
    assert marks in made(kind, [("paragraph", [[marks]])]).text


@pytest.mark.parametrize("kind", ["docx", "xlsx", "pptx"])
def test_a_paragraph_at_the_top_changes_few_chunks(kind: str) -> None:
    body: list[Element] = [("paragraph", [[" ".join(f"word{n}a{m}" for m in range(12)) + "."]]) for n in range(120)]
    before = {chunk.text for chunk in cut(made(kind, body), PLAIN, max_tokens=100)}
    after = {chunk.text for chunk in cut(made(kind, [("paragraph", [["New on top."]]), *body]), PLAIN, max_tokens=100)}
    assert len(before) > 10
    assert len(after - before) <= 8
