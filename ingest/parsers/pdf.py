"""PDF. PDFium reads the text page by page; the document is that text, a blank line between pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pypdfium2
from pypdfium2 import raw

from ingest.parsers.outline import Mark, Outline, anchors_of, heading_mark
from storage.errors import FileError
from storage.types import Block, ParsedDocument

_WRONG_PASSWORD = 4  # FPDF_ERR_PASSWORD
_LARGER = 1.15  # a heading's letters against the body's
_ENDS = tuple(".!?:;。！？：；…")


@dataclass(frozen=True)
class PdfParser:
    """Text and pages; headings only where number or letter size leave little doubt.

    A password that only forbids printing or copying does not keep a file from being read.
    """

    name: str = "pdf"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        document = _open(data)
        try:
            pages = [_read_page(document, index) for index in range(len(document))]
            title = document.get_metadata_value("Title").strip()
        finally:
            document.close()
        if not any(page.lines for page in pages):
            raise _no_text(pages)
        return _assemble(pages, title)


@dataclass
class _Page:
    """A page's lines, each with the size of its first letter."""

    lines: list[str] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    has_marks: bool = False  # pictures or drawings
    damaged: bool = False


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


def _no_text(pages: list[_Page]) -> FileError:
    if any(page.has_marks for page in pages):
        return FileError(
            "The PDF holds only pictures of its pages; run it through OCR and send it again.",
            code="ocr_required",
        )
    if any(page.damaged for page in pages):
        return FileError("None of the PDF's pages can be read.", code="invalid_file")
    return FileError("There is no text in this PDF.", code="no_text_extracted")


def _read_page(document: Any, index: int) -> _Page:
    result = _Page()
    try:
        page = document[index]
    except pypdfium2.PdfiumError:
        result.damaged = True
        return result
    text_page = page.get_textpage()
    # PDFium writes U+0002 (or U+FFFE) for a hyphen that only breaks a word at a line's end.
    text = text_page.get_text_range(errors="replace")
    offset = 0
    for line in text.split("\r\n"):
        shown = _clean(line)
        if shown:
            result.lines.append(shown)
            result.sizes.append(_letter_size(text_page, offset + len(line) - len(line.lstrip())))
        offset += len(line) + 2
    result.has_marks = bool(result.lines) or next(iter(page.get_objects(max_depth=1)), None) is not None
    text_page.close()
    page.close()
    return result


def _clean(line: str) -> str:
    kept = line.replace("\ufffe", "").replace("\x02", "").replace("\xad", "")
    return "".join(c if c >= " " else " " for c in kept).strip()


def _letter_size(text_page: Any, text_index: int) -> float:
    character = raw.FPDFText_GetCharIndexFromTextIndex(text_page.raw, text_index)
    return float(raw.FPDFText_GetFontSize(text_page.raw, character)) if character >= 0 else 0.0


def _assemble(pages: list[_Page], title: str) -> ParsedDocument:
    body = _body_size(pages)
    parts: list[str] = []
    blocks: list[Block] = []
    starts: list[int] = []
    outline = Outline()
    length = 0
    for page in pages:
        starts.append(length)
        for kind, lines in _page_blocks(page, body, outline):
            text = "\n".join(lines)
            blocks.append(Block(kind, length, length + len(text), outline.path, "", _breaks(lines, length)))
            parts.append(text)
            length += len(text) + 2
    text = "\n\n".join(parts)
    # A page at the end without text would start past the text's end.
    anchors = anchors_of(blocks, [min(start, len(text)) for start in starts])
    return ParsedDocument(text, tuple(blocks), anchors, title, _warnings(pages))


def _body_size(pages: list[_Page]) -> float:
    sizes: Counter[float] = Counter()
    for page in pages:
        for line, size in zip(page.lines, page.sizes, strict=True):
            sizes[round(size, 1)] += len(line)
    return sizes.most_common(1)[0][0] if sizes else 0.0


def _page_blocks(page: _Page, body: float, outline: Outline) -> Iterator[tuple[str, list[str]]]:
    """A page's headings, and the lines between them; entering a heading changes the outline."""
    begun = 0
    for index, line in enumerate(page.lines):
        mark = _heading(page, index, body)
        if mark is None:
            continue
        if begun < index:
            yield "paragraph", page.lines[begun:index]
        outline.enter(mark, line)
        yield "heading", [line]
        begun = index + 1
    if begun < len(page.lines):
        yield "paragraph", page.lines[begun:]


def _heading(page: _Page, index: int, body: float) -> Mark | None:
    line, size = page.lines[index], page.sizes[index]
    numbered = heading_mark(page.lines, index)
    if numbered is not None:
        return numbered
    short = 2 < len(line) <= 90 and not line.endswith(_ENDS) and any(map(str.isalpha, line))
    if not short or body <= 0 or size < body * _LARGER or index + 1 == len(page.lines):
        return None
    # The larger the letters the higher the heading: sizes a half point apart are told apart.
    return Mark("level", -round(size * 2))


def _breaks(lines: list[str], start: int) -> tuple[int, ...]:
    """Where a paragraph seems to end: a line that closes a sentence well short of the full width."""
    width = max(map(len, lines))
    found: list[int] = []
    offset = start
    for line in lines[:-1]:
        offset += len(line) + 1
        if line.endswith(_ENDS) and len(line) < width * 0.85:
            found.append(offset)
    return tuple(found)


def _warnings(pages: list[_Page]) -> tuple[str, ...]:
    messages = []
    for number, page in enumerate(pages, 1):
        if page.damaged:
            messages.append(f"Page {number} is damaged and was not read.")
        elif not page.lines and page.has_marks:
            messages.append(f"Page {number} has no text, only a picture; it was not read.")
    return tuple(messages)
