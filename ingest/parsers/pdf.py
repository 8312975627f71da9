"""PDF. PDFium reads the words of a page with their places; they are put in a reader's order and written as text.

The text depends on nothing but the words' order and kind, never on where a page ends: an edit that moves every page break
changes the chunks it touches only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pypdfium2

from ingest.parsers.outline import Mark, Outline, begins_clause, heading_mark
from ingest.parsers.pdf_columns import reading_order
from ingest.parsers.pdf_lines import LARGER, SENTENCE_ENDS, Line, body_size, continues_table, in_sequence, lines_of
from ingest.parsers.pdf_page import Page, Run, read_page
from ingest.parsers.pdf_tables import LEADER, take_grids, with_aligned
from ingest.parsers.writer import Writer
from storage.errors import FileError
from storage.types import ParsedDocument

_WRONG_PASSWORD = 4  # FPDF_ERR_PASSWORD
_SHORT = 0.85  # of the usual width: a line that ends earlier may end its paragraph


@dataclass(frozen=True)
class PdfParser:
    """Text and pages, columns and tables; headings only where number or letter size leave little doubt.

    A password that only forbids printing or copying does not keep a file from being read.
    """

    name: str = "pdf"
    version: int = 2

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        document = _open(data)
        pages: list[list[Line]] = []
        found: list[Page] = []
        try:
            for index in range(len(document)):
                page = _read(document, index)
                pages.append(lines_of(_ordered(page), index + 1))
                found.append(Page(has_marks=page.has_marks, damaged=page.damaged))
            title = document.get_metadata_value("Title").strip()
        finally:
            document.close()
        if not any(pages):
            raise _no_text(found)
        writer = Writer(warnings=list(_warnings(pages, found)))
        _Text(writer, body_size(pages), _usual_width(pages)).write(in_sequence(pages))
        return writer.document(title)


def _open(data: bytes) -> Any:
    try:
        return pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if getattr(error, "err_code", None) == _WRONG_PASSWORD:
            raise FileError(
                "The PDF is protected by a password; remove it and send the file again.",
                code="password_required",
            ) from error
        raise FileError("The PDF is damaged and cannot be opened.", code="invalid_file") from error


def _no_text(pages: list[Page]) -> FileError:
    if any(page.has_marks for page in pages):
        return FileError(
            "The PDF holds only pictures of its pages; run it through OCR and send it again.",
            code="ocr_required",
        )
    if any(page.damaged for page in pages):
        return FileError("None of the PDF's pages can be read.", code="invalid_file")
    return FileError("There is no text in this PDF.", code="no_text_extracted")


def _warnings(pages: list[list[Line]], found: list[Page]) -> list[str]:
    messages = []
    for number, (lines, page) in enumerate(zip(pages, found, strict=True), 1):
        if page.damaged:
            messages.append(f"Page {number} is damaged and was not read.")
        elif not lines and page.has_marks:
            messages.append(f"Page {number} has no text, only a picture; it was not read.")
    return messages


def _read(document: Any, index: int) -> Page:
    try:
        page = document[index]
    except pypdfium2.PdfiumError:
        return Page(damaged=True)
    try:
        return read_page(page)
    finally:
        page.close()


def _ordered(page: Page) -> list[list[Run]]:
    """The page's regions in reading order, with its tables; in the file's order where lines are not level."""
    if not page.level:
        return [page.runs]
    take_grids(page)
    letters = "".join(run.text for run in page.runs)
    to_left = sum("\u0590" <= letter <= "\u08ff" for letter in letters)
    regions = reading_order(page.runs, right_to_left=2 * to_left > len(letters))
    return [with_aligned(region, page.across) for region in regions]


def _usual_width(pages: list[list[Line]]) -> float:
    """A full line's width in points, coarse enough that an edit does not change it."""
    widths = sorted(line.x1 - line.x0 for page in pages for line in page if not line.rows)
    return 12 * round(widths[int(0.95 * (len(widths) - 1))] / 12) if widths else 0.0


@dataclass
class _Text:
    """Writes lines as blocks: a section's running text is one, whatever pages it is on."""

    writer: Writer
    body: float
    width: float
    _outline: Outline = field(default_factory=Outline)
    _parts: list[str] = field(default_factory=list)
    _length: int = 0
    _breaks: list[int] = field(default_factory=list)
    _pages: list[tuple[int, int]] = field(default_factory=list)

    def write(self, sequence: Sequence[Line]) -> None:
        """Write all of it."""
        sequence = _joined_tables(sequence)
        running = [line for line in sequence if not line.aside]
        texts = [_first_row(line) if line.rows else _shown(line) for line in running]
        place = -1
        for index, line in enumerate(sequence):
            if line.aside:
                self._aside(line, index > 0 and sequence[index - 1].aside == line.aside)
                continue
            place += 1
            if self._parts and index and sequence[index - 1].aside:
                self._close("paragraph")
            mark = None if line.rows else self._heading(running, texts, place)
            if line.rows:
                self._close("paragraph")
                self._table(line)
            elif mark is not None:
                self._close("paragraph")
                self.writer.path = self._outline.enter(mark, texts[place])
                self._add(line)
                self._close("heading")
            else:
                before = running[place - 1] if place and self._parts else None
                self._add(line, before, begins_clause(texts, place))
        self._close("paragraph")

    def _heading(self, running: Sequence[Line], texts: Sequence[str], place: int) -> Mark | None:
        line, size = texts[place], running[place].size
        numbered = heading_mark(texts, place)
        if numbered is not None:
            return numbered
        short = 2 < len(line) <= 90 and not line.endswith(SENTENCE_ENDS) and any(map(str.isalpha, line))
        if not short or LEADER.search(line) or self.body <= 0 or size < self.body * LARGER or place + 1 == len(texts):
            return None
        # The larger the letters the higher the heading: sizes a half point apart are told apart.
        return Mark("level", -round(size * 2))

    def _aside(self, line: Line, goes_on: bool) -> None:
        if not goes_on:
            self._close("paragraph")
        self._add(line)

    def _table(self, line: Line) -> None:
        self.writer.table(line.rows, _headers(line.rows), pages=line.parts)

    def _add(self, line: Line, before: Line | None = None, clause: bool = False) -> None:
        """Put a line at the end of the block in hand; `before` is the line that it may go on from."""
        text = _shown(line)
        if before is not None and _is_one_word(before, line):
            self._parts[-1] = self._parts[-1][:-1]
            self._length -= 1
        elif self._parts:
            self._parts.append("\n")
            self._length += 1
            if clause or (before is not None and before.ends_sentence and before.x1 - before.x0 < _SHORT * self.width):
                self._breaks.append(self._length)
        self._pages.append((self._length, line.page))
        self._parts.append(text)
        self._length += len(text)

    def _close(self, kind: str) -> None:
        self.writer.add(kind, "".join(self._parts), breaks=self._breaks, pages=self._pages)
        self._parts, self._length, self._breaks, self._pages = [], 0, [], []


def _shown(line: Line) -> str:
    return line.text + "-" if line.hyphen else line.text


def _is_one_word(before: Line, line: Line) -> bool:
    """Whether a hyphen at a line's end only breaks a word. PDFium says so within what it takes for a paragraph; its rule, a
    letter before and a letter or figure after, holds where a column or a page ends as well."""
    if not line.text[:1].isalnum():
        return False
    elsewhere = before.page != line.page or before.order + 1 != line.order
    return before.hyphen or (elsewhere and before.text[-1:] == "-" and before.text[-2:-1].isalpha())


def _joined_tables(sequence: Sequence[Line]) -> list[Line]:
    """Tables that go on over pages as one; a header that is repeated on each is kept once."""
    result: list[Line] = []
    for line in sequence:
        if not (result and continues_table(result[-1], line)):
            result.append(line)
            continue
        table = result[-1]
        more = line.rows[1:] if _headers(table.rows) and line.rows[0] == table.rows[0] else line.rows
        if more:
            result[-1] = replace(table, rows=table.rows + more, parts=(*table.parts, (line.page, len(more))))
    return result


def _headers(rows: Sequence[Sequence[str]]) -> int:
    """How many rows are the header: the first, if each of its cells says something, and none is a number."""
    return int(len(rows) > 2 and all(any(map(str.isalpha, cell)) and not cell[0].isdigit() for cell in rows[0]))


def _first_row(line: Line) -> str:
    return " ".join(line.rows[0])
