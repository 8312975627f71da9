"""Word documents. The document is what a reader sees: numbers, notes and text boxes in place, nothing that was deleted.

The XML is read directly: python-docx knows neither notes, numbering, text boxes, content controls nor tracked changes, and
unpacks every part of a file uncounted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ingest.parsers.damage import reading
from ingest.parsers.docx_numbering import Numbering, W, value
from ingest.parsers.docx_styles import Styles
from ingest.parsers.docx_tables import is_layout, rows_of
from ingest.parsers.docx_text import Reader, Run, blocks_in
from ingest.parsers.outline import Mark, Outline, heading_mark
from ingest.parsers.package import Package, Relation
from ingest.parsers.writer import Writer
from storage.errors import FileError
from storage.types import ParsedDocument

_SHORT = 240  # characters: items of a list that are longer are clauses, each a paragraph
_BESIDE = "Header and footer"  # the heading path of what stands on every page
_PICTURE = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_VML = "{urn:schemas-microsoft-com:vml}"
_ID = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"


@dataclass(frozen=True)
class DocxParser:
    """Headings by outline level, also inherited; numbered headings by their looks where no style says so."""

    name: str = "docx"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        with reading("document"):
            document = _Document(Package(data))
            items = document.read()
        if not items and document.has_pictures:
            raise FileError("The document holds only pictures; run them through OCR and send it again.", code="ocr_required")
        return _assemble(items)


@dataclass
class _Item:
    """A paragraph or table of the document. `level`: of a heading, 0 for the title; `listed`: in a list, how deep."""

    text: str = ""
    level: int | None = None
    listed: int | None = None
    rows: list[list[str]] = field(default_factory=list)
    headers: int = 0
    beside: bool = False  # from a page's header or footer


class _Document:
    """The parts of a package and what has been read of them."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._main = package.main()
        self._relations = package.relations(self._main)
        self._styles = Styles.of(self._part("styles"))
        self._numbering = Numbering.of(self._part("numbering"))
        self._notes: dict[tuple[str, str], Any] = {}
        for kind, tag in (("footnotes", "footnote"), ("endnotes", "endnote")):
            root = self._part(kind)
            for note in root.findall(W + tag) if root is not None else ():
                if value(note, "@type") in (None, "normal"):
                    self._notes[kind, value(note, "@id") or ""] = note
        self.has_pictures = False
        self._reader = Reader()
        self._held: Run | None = None  # a paragraph whose end was deleted: it runs on into the next

    def _part(self, kind: str) -> Any | None:
        found = next((r for r in self._relations.values() if r.kind == kind and not r.external), None)
        return self._package.xml(found.target) if found is not None else None

    def read(self) -> list[_Item]:
        """The body in order, then each header and footer once. Raises LookupError for a package without a body."""
        root = self._package.xml(self._main)
        body = root.find(f"{W}body") if root is not None else None
        if body is None:
            raise LookupError("no body")
        self.has_pictures = next(body.iter(f"{_PICTURE}blip", f"{_VML}imagedata"), None) is not None
        items = list(self._story(body))
        seen: set[str] = set()
        for reference in body.iter(f"{W}headerReference", f"{W}footerReference"):
            for text in self._beside(self._relations.get(reference.get(_ID, ""))):
                if text not in seen:
                    items.append(_Item(text, beside=True))
                    seen.add(text)
        return items

    def _beside(self, relation: Relation | None) -> Iterator[str]:
        part = self._package.xml(relation.target) if relation is not None and not relation.external else None
        if part is None:
            return
        self._reader = Reader(self._reader.marks)
        for item in self._story(part):
            text = item.text or "\n".join(" | ".join(filter(None, row)) for row in item.rows)
            if re.search(r"[^\W\d_]{2}", text):  # more than a page's number
                yield text

    def _story(self, parent: Any, depth: int = 0) -> Iterator[_Item]:
        for element in blocks_in(parent):
            if element.tag == W + "p":
                yield from self._paragraph(element, depth)
            elif is_layout(element):
                for _, cells in rows_of(element):
                    for cell in cells:
                        if cell is not None:
                            yield from self._story(cell, depth)
            else:
                yield from self._table(element, depth)
        if self._held is not None:
            held, self._held = self._held, None
            yield _Item(held.text)
            yield from self._attached(held, depth)

    def _paragraph(self, element: Any, depth: int) -> Iterator[_Item]:
        run = self._reader.paragraph(element)
        if self._held is not None:
            before, self._held = self._held, None
            run = Run(before.parts + run.parts, before.notes + run.notes, before.boxes + run.boxes)
        properties = element.find(f"{W}pPr")
        if _end_is_deleted(properties):
            self._held = run
            return
        style = self._styles.of_paragraph(properties)
        label, listed = self._label(properties, style)
        if text := run.text:
            level = self._styles.outline_level(properties, style)
            yield _Item(f"{label} {text}" if label else text, level, listed)
        yield from self._attached(run, depth)

    def _label(self, properties: Any | None, style: str) -> tuple[str, int | None]:
        """The number before a paragraph's text, and how deep in a list it stands, if it does."""
        num, depth = self._styles.list_of(properties, style, self._numbering)
        if num is None:
            return "", None
        label = self._numbering.next(num, depth)
        return label, depth if label else None

    def _attached(self, run: Run, depth: int) -> Iterator[_Item]:
        """What hangs on a paragraph: its text boxes, then its notes, each once."""
        if depth > 3:
            return
        for box in run.boxes:
            yield from self._story(box, depth + 1)
        for note in run.notes:
            element = self._notes.pop(note, None)
            if element is not None:
                mark = self._reader.marks[note]
                items = list(self._story(element, depth + 1))
                text = "\n".join(item.text for item in items if not item.rows)
                yield _Item(f"{mark}: {text}")
                yield from (item for item in items if item.rows)

    def _table(self, element: Any, depth: int) -> Iterator[_Item]:
        item, runs = _Item(), []
        for is_header, cells in rows_of(element):
            texts: list[str] = []
            for cell in cells:
                inner: list[str] = []
                for paragraph in blocks_in(cell) if cell is not None else ():
                    run = self._reader.paragraph(paragraph)
                    runs.append(run)
                    properties = paragraph.find(f"{W}pPr")
                    label, _ = self._label(properties, self._styles.of_paragraph(properties))
                    inner += [label, *run.text.split()] if run.text else []
                texts.append(" ".join(filter(None, inner)))
            item.rows.append(texts)
            item.headers += is_header and item.headers == len(item.rows) - 1
        item.headers = item.headers or int(len(item.rows) > 1)
        if item.headers == len(item.rows):
            item.headers = 0
        yield item
        for run in runs:
            yield from self._attached(run, depth)


def _end_is_deleted(properties: Any | None) -> bool:
    marks = properties.find(f"{W}rPr") if properties is not None else None
    return marks is not None and any(marks.find(W + name) is not None for name in ("del", "moveFrom"))


# --- writing ---


def _assemble(items: list[_Item]) -> ParsedDocument:
    if all(item.level is None for item in items):
        _guess_headings(items)
    writer, outline = Writer(), Outline()
    title = ""
    listed: list[_Item] = []
    for item in items:
        if item.listed is not None and item.level is None:
            listed.append(item)
            continue
        _write_list(writer, listed)
        if item.beside:
            writer.path = (_BESIDE,)
            writer.add("paragraph", item.text)
        elif item.rows:
            writer.table(item.rows, item.headers)
        elif item.level is not None:
            heading = " ".join(item.text.split())
            title = title or heading
            writer.path = outline.enter(Mark("level", item.level), heading)
            writer.add("heading", item.text)
        else:
            writer.add("paragraph", item.text)
    _write_list(writer, listed)
    return writer.document(title)


def _write_list(writer: Writer, items: list[_Item]) -> None:
    """A run of list items: one block if they are short, else each a paragraph, as clauses are."""
    if all(len(item.text) <= _SHORT for item in items):
        least = min((item.listed or 0 for item in items), default=0)
        lines = ["  " * ((item.listed or 0) - least) + item.text.replace("\n", " ") for item in items]
        writer.lines("list", lines)
    else:
        for item in items:
            writer.add("paragraph", item.text)
    items.clear()


def _guess_headings(items: list[_Item]) -> None:
    """In a document without heading styles: lines that look like numbered headings, as in plain text."""
    lines: list[str] = []
    for item in items:
        lines += [" ".join(item.text.split()) if not (item.rows or item.beside) else "|", ""]
    for index, item in enumerate(items):
        mark = heading_mark(lines, 2 * index)
        # A line beside one of its own kind is an item of a list.
        if mark is not None and (index == 0 or heading_mark([lines[2 * index - 2], "Body"], 0) != mark):
            item.level = 1 + mark.depth
