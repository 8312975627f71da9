"""Tables as text: comma, tab, semicolon or bar between cells. The file's own text is the document."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass

from ingest.delimiter import delimiter_of
from ingest.encoding import decode
from ingest.parsers.outline import anchors_of
from ingest.parsers.text import line_blocks
from storage.types import Block, ParsedDocument


@dataclass(frozen=True)
class CsvParser:
    """One table that may be cut before any record but the first, which stays with the header."""

    name: str = "csv"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        text = decode(data)
        blocks = _table(text)
        return ParsedDocument(text, tuple(blocks), anchors_of(blocks))


def _table(text: str) -> list[Block]:
    lines = text.split("\n")
    try:
        records = _records(lines, delimiter_of(lines) or ",")
    except csv.Error:
        return line_blocks(text)
    if not records:
        return []
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line) + 1)
    starts = [offsets[first] for first, _ in records]
    end = offsets[records[-1][1]] - 1
    header = text[starts[0] : offsets[records[0][1]] - 1]
    stop = starts[0] + len(text[starts[0] : end].rstrip())
    return [Block("table", starts[0], stop, (), header, tuple(start for start in starts[2:] if start < stop))]


def _records(lines: Sequence[str], delimiter: str) -> list[tuple[int, int]]:
    """The lines [first, last) of each record that is not blank: a quoted cell may hold line ends.

    A record over several lines that is not as wide as the header is a stray quote: its lines are records.
    Raises csv.Error.
    """
    reader = csv.reader((line + "\n" for line in lines), delimiter=delimiter)
    found: list[tuple[int, int]] = []
    width = first = 0
    for cells in reader:
        last = reader.line_num
        width = width or len(cells)
        whole = last - first == 1 or len(cells) == width
        for begun, ended in [(first, last)] if whole else [(line, line + 1) for line in range(first, last)]:
            if any(line.strip() for line in lines[begun:ended]):
                found.append((begun, ended))
        first = last
    return found
