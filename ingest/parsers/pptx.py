"""PowerPoint presentations: a section per slide, its number as the page; shapes in reading order, then the notes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ingest.parsers.damage import reading
from ingest.parsers.package import TREES, inspect, parse_xml
from ingest.parsers.writer import Writer
from storage.errors import FileError
from storage.types import ParsedDocument

_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_C = "{http://schemas.openxmlformats.org/drawingml/2006/chart}"
_DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds"
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_CHOICE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Choice"
_REPEATED = frozenset({"SLIDE_NUMBER", "DATE"})  # placeholders that say nothing of their slide
_SAME_ROW = 25  # shapes whose tops are less than this part of the slide's height apart stand side by side
_HIDDEN = "[Hidden slide]"


@dataclass(frozen=True)
class PptxParser:
    """Hidden slides are read and marked: they are often what a talk is asked about. A footer stands once."""

    name: str = "pptx"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        from pptx.package import Package  # here: a child that meets no presentation need not load it

        with reading("presentation"):
            inspect(data, TREES)
            deck: Any = Package.open(io.BytesIO(data)).main_document_part
            slides = list(_slides(deck.presentation))
        if not any(slide.title or slide.pieces for slide in slides) and any(slide.pictures for slide in slides):
            raise FileError("The slides hold only pictures; run them through OCR and send them again.", code="ocr_required")
        return _assemble(slides)


@dataclass
class _Piece:
    """A shape's text: lines of paragraphs, or rows of a table of which the first `headers` are its header."""

    lines: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    headers: int = 0


@dataclass
class _Slide:
    title: str = ""
    pieces: list[_Piece] = field(default_factory=list)
    notes: str = ""
    hidden: bool = False
    pictures: bool = False


def _slides(presentation: Any) -> Iterator[_Slide]:
    footers: set[str] = set()
    height = presentation.slide_height or 1
    for slide in presentation.slides:
        found = _Slide(hidden=slide._element.get("show") in {"0", "false"})
        title = slide.shapes.title
        found.title = " ".join(title.text_frame.text.split()) if title is not None else ""
        body = [s for s in slide.shapes if title is None or s.shape_id != title.shape_id]
        for shape in _leaves(body, height):
            kind = shape.placeholder_format.type.name if shape.is_placeholder else ""
            if kind in _REPEATED:
                continue
            found.pictures = found.pictures or _is(shape, "PICTURE")
            for piece in _pieces(shape):
                if kind == "FOOTER":
                    text = "\n".join(piece.lines)
                    if text in footers:
                        continue
                    footers.add(text)
                found.pieces.append(piece)
        found.pieces += _alternatives(slide)
        if slide.has_notes_slide and (frame := slide.notes_slide.notes_text_frame) is not None:
            found.notes = "\n".join(_lines(frame.paragraphs))
        yield found


# --- shapes ---


def _is(shape: Any, kind: str) -> bool:
    return shape.shape_type is not None and bool(shape.shape_type.name == kind)


def _leaves(shapes: Iterable[Any], height: int) -> Iterator[Any]:
    """Shapes that are no groups, row by row from the top, in a row from the left; a group stays together."""
    placed = sorted(shapes, key=lambda shape: shape.top or 0)
    rows: list[list[Any]] = []
    for shape in placed:
        if not rows or (shape.top or 0) - (rows[-1][0].top or 0) >= height / _SAME_ROW:
            rows.append([])
        rows[-1].append(shape)
    for row in rows:
        for shape in sorted(row, key=lambda shape: shape.left or 0):
            if _is(shape, "GROUP"):
                yield from _leaves(shape.shapes, height)
            else:
                yield shape


def _pieces(shape: Any) -> Iterator[_Piece]:
    if shape.has_text_frame:
        lines = _lines(shape.text_frame.paragraphs)
        if lines:
            yield _Piece(lines=lines)
    elif getattr(shape, "has_table", False):
        rows = [["" if c.is_spanned else " ".join(c.text_frame.text.split()) for c in r.cells] for r in shape.table.rows]
        yield _Piece(rows=rows, headers=int(bool(shape.table.first_row) and len(rows) > 1))
    elif getattr(shape, "has_chart", False):
        yield from _chart(shape.chart.part._element)
    else:
        for diagram in shape._element.iter(_DIAGRAM):
            related = shape.part.related_part(diagram.get(_RELATION + "dm"))
            lines = _plain(parse_xml(related.blob))
            if lines:
                yield _Piece(lines=lines)


def _lines(paragraphs: Iterable[Any]) -> list[str]:
    """A text frame's paragraphs, indented by level; a line break inside one is a blank."""
    texts = ((p.level, " ".join(p.text.split())) for p in paragraphs)
    return ["  " * level + text for level, text in texts if text]


def _plain(root: Any) -> list[str]:
    """The DrawingML paragraphs under an element."""
    texts = (" ".join("".join(t.text or "" for t in p.iter(_A + "t")).split()) for p in root.iter(_A + "p"))
    return [text for text in texts if text]


def _chart(root: Any) -> Iterator[_Piece]:
    """A chart's titles, and its series as a table: the values that the file keeps beside the drawing."""
    if titles := _plain(root):
        yield _Piece(lines=titles)
    series = [
        (_points(s, "tx"), _points(s, "cat") or _points(s, "xVal"), _points(s, "val") or _points(s, "yVal"))
        for s in root.iter(_C + "ser")
    ]
    if series:
        labels = max((categories for _, categories, _ in series), key=len)
        places = sorted({place for _, _, values in series for place in values} | set(labels))
        head = ["", *(name.get(0, "") for name, _, _ in series)]
        rows = [[labels.get(place, ""), *(values.get(place, "") for _, _, values in series)] for place in places]
        yield _Piece(rows=[head, *rows], headers=1 if any(head) else 0)


def _points(series: Any, name: str) -> dict[int, str]:
    part = series.find(_C + name)
    points = part.iter(_C + "pt") if part is not None else ()
    found = {int(p.get("idx", "0")): (p.findtext(_C + "v") or "").strip() for p in points}
    literal = part.findtext(_C + "v") if part is not None else None
    return found or ({0: literal.strip()} if literal else {})


def _alternatives(slide: Any) -> Iterator[_Piece]:
    """Shapes that a file keeps in two versions, which python-pptx passes over: formulas and the like."""
    for choice in slide.shapes._spTree.iter(_CHOICE):
        if lines := _plain(choice):
            yield _Piece(lines=lines)


# --- writing ---


def _assemble(slides: list[_Slide]) -> ParsedDocument:
    """Each slide a section of its own, whatever its neighbours are called."""
    writer = Writer()
    for number, slide in enumerate(slides, 1):
        writer.page(number)
        writer.path = (slide.title or f"Slide {number}",)
        alone = not (slide.pieces or slide.notes or slide.hidden)
        if alone and slide.title:  # a heading would go with the next slide's text
            writer.path = (f"Slide {number}",)
            writer.add("paragraph", slide.title)
        elif alone and slide.pictures:
            writer.warnings.append(f"Slide {number} has no text, only a picture; it was not read.")
        elif not alone:
            _write(writer, slide)
    return writer.document(next((slide.title for slide in slides if slide.title), ""))


def _write(writer: Writer, slide: _Slide) -> None:
    writer.add("heading", slide.title)
    if slide.hidden:
        writer.add("paragraph", _HIDDEN)
    for piece in slide.pieces:
        if piece.rows:
            writer.table(piece.rows, piece.headers)
        elif len(piece.lines) == 1:
            writer.add("paragraph", piece.lines[0].strip())
        else:
            writer.lines("list", piece.lines)
    if slide.notes:
        writer.add("paragraph", f"Notes: {slide.notes}")
