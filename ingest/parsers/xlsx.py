"""Excel workbooks: a section per sheet, its rows as tables, values as a reader sees them.

Read as a stream, so that memory does not follow a sheet's size; what is over a cap is cut, and the text says so.
"""

from __future__ import annotations

import datetime
import io
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from ingest.parsers.damage import reading
from ingest.parsers.package import STREAMS, inspect
from ingest.parsers.writer import Writer
from storage.types import ParsedDocument

_HIDDEN = "[Hidden sheet]"
# A formula whose result is not stored: the cell ends right behind it, or behind an empty value.
_NO_RESULT = re.compile(rb"(?:</(?:\w+:)?f>|<(?:\w+:)?f\b[^>]*/>)(?:<(?:\w+:)?v\s*/>|<(\w+:)?v></(?:\w+:)?v>)?</(?:\w+:)?c>")
_PIECE = 1 << 20


@dataclass
class _Budget:
    """What may still be read of a workbook: filled cells, places looked at (gaps count), characters."""

    cells: int
    places: int
    characters: int

    def take(self, places: int, texts: Sequence[str]) -> None:
        self.places -= places
        self.cells -= sum(map(bool, texts))
        self.characters -= sum(map(len, texts))

    @property
    def spent(self) -> bool:
        return min(self.cells, self.places, self.characters) < 0


@dataclass
class _Row:
    """A row's cells as text. `is_text`: all that is filled was text in the file, as in a header."""

    cells: list[str]
    is_text: bool

    @property
    def filled(self) -> int:
        return sum(map(bool, self.cells))


@dataclass
class _Sheet:
    name: str
    rows: list[_Row] = field(default_factory=list)
    hidden: bool = False
    cut: bool = False

    def add(self, texts: list[str], is_text: bool) -> None:
        """Keep a row; of empty ones that follow each other the first."""
        while texts and not texts[-1]:
            texts.pop()
        if texts or (self.rows and self.rows[-1].cells):
            self.rows.append(_Row(texts, is_text))


@dataclass(frozen=True)
class XlsxParser:
    """Formulas give their stored result, or themselves where no program has computed one."""

    name: str = "xlsx"
    version: int = 1
    cells: int = 500_000
    places: int = 20_000_000
    characters: int = 20_000_000

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        with reading("workbook"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # openpyxl tells of styles and extensions that it does not know
            inspect(data, STREAMS)
            sheets = list(self._sheets(data))
        writer = Writer()
        for sheet in sheets:
            _write(writer, sheet, self.cells)
        return writer.document()

    def _sheets(self, data: bytes) -> Iterator[_Sheet]:
        budget = _Budget(self.cells, self.places, self.characters)
        book = _open(data, results=True)
        formulas = _open(data, results=False) if _has_uncomputed(data) else None
        for index, sheet in enumerate(book.worksheets):
            found = _Sheet(sheet.title, hidden=sheet.sheet_state != "visible")
            beside = formulas.worksheets[index].iter_rows() if formulas is not None else repeat(())
            for row, written in zip(sheet.iter_rows(), beside, strict=False):
                texts = [_shown(cell) for cell in row]
                for place, cell in enumerate(written):
                    if cell.data_type == "f" and place < len(texts) and not texts[place]:
                        texts[place] = _formula(cell.value)
                budget.take(len(row) + 1, texts)
                if budget.spent:
                    found.cut = True
                    break
                found.add(texts, all(isinstance(c.value, str) for c in row if c.value is not None))
            yield found


def _open(data: bytes, *, results: bool) -> Any:
    import openpyxl  # here: it brings numpy along, and a child that meets no workbook need not load it

    book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=results, keep_links=False)
    for sheet in book.worksheets:
        sheet.reset_dimensions()  # which a file may state as it likes
    return book


def _has_uncomputed(data: bytes) -> bool:
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        for name in package.namelist():
            if not name.startswith("xl/worksheets/"):
                continue
            tail = b""
            with package.open(name) as part:
                while piece := part.read(_PIECE):
                    if _NO_RESULT.search(tail + piece):
                        return True
                    tail = piece[-200:]
    return False


# --- values ---


def _shown(cell: Any) -> str:
    """A value as text: dates ISO, 15 significant digits as Excel keeps them, percentages as such."""
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, (int, float)):
        return f"{_number(value * 100)}%" if "%" in cell.number_format else _number(value)
    if isinstance(value, datetime.datetime):
        midnight = value.time() == datetime.time()
        return value.date().isoformat() if midnight else value.isoformat(sep=" ", timespec="seconds")
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else str(value)


def _number(value: float) -> str:
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < 1e15)
    return str(int(value)) if whole else f"{value:.15g}"


def _formula(value: Any) -> str:
    text = value if isinstance(value, str) else getattr(value, "text", None) or ""
    return " ".join(text.split())


# --- writing ---


def _write(writer: Writer, sheet: _Sheet, cells: int) -> None:
    rows = _trimmed(sheet.rows)
    if not rows and not sheet.cut:
        return
    writer.path = (sheet.name,)
    writer.add("heading", sheet.name)
    if sheet.hidden:
        writer.add("paragraph", _HIDDEN)
    header = ""
    for run in _runs(rows):
        header = _write_run(writer, run, header)
    if sheet.cut:
        left = f"Sheet {sheet.name!r} was cut here: the workbook has more than the {cells:,} cells that are read."
        writer.add("paragraph", f"[{left}]")
        writer.warnings.append(left)


def _trimmed(rows: Sequence[_Row]) -> list[_Row]:
    """The rows without columns that are empty in all of them."""
    used = sorted({place for row in rows for place, text in enumerate(row.cells) if text})
    if not used:
        return []
    return [_Row([row.cells[place] if place < len(row.cells) else "" for place in used], row.is_text) for row in rows]


def _runs(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows between empty ones; lines above a table that fill one cell only are a run of their own."""
    run: list[_Row] = []
    for row in rows:
        filled = row.filled
        if run and (not filled or (filled > 1 and all(above.filled == 1 for above in run))):
            yield run
            run = []
        if filled:
            run.append(row)
    if run:
        yield run


def _write_run(writer: Writer, run: list[_Row], header: str) -> str:
    """A run as a table, or as lines if no row fills more than a cell; the header that holds from here on."""
    if all(row.filled == 1 for row in run):
        writer.lines("list" if len(run) > 1 else "paragraph", ["".join(row.cells) for row in run])
        return header
    headed = len(run) > 1 and run[0].is_text and not all(row.is_text and row.filled >= run[0].filled for row in run[1:])
    if headed or not header:
        headers = int(len(run) > 1 and run[0].is_text)
        writer.table([row.cells for row in run], headers)
        return " | ".join(run[0].cells) if headers else ""
    writer.table([row.cells for row in run], 0, header)
    return header
