"""What parsers write a document with that is not its file's own text: blocks with a blank line between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ingest.parsers.outline import anchors_of
from storage.types import Anchor, Block, ParsedDocument


@dataclass
class Writer:
    """The text written so far, its blocks and pages. `path` is the heading path of what comes next."""

    path: tuple[str, ...] = ()
    length: int = 0
    warnings: list[str] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)
    _blocks: list[Block] = field(default_factory=list)
    _pages: dict[int, int | None] = field(default_factory=dict)  # by where they begin

    def add(
        self, kind: str, text: str, *, header: str = "", breaks: Sequence[int] = (), pages: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Write a block; `breaks` count from its start, and so do `pages`: where each begins. What is blank is not written."""
        if not text or text.isspace():
            return
        start = self._begin()
        self._pages |= {start + offset: page for offset, page in pages}
        self._write(text)
        shifted = tuple(start + offset for offset in breaks)
        self._blocks.append(Block(kind, start, self.length, self.path, header, shifted))

    def lines(self, kind: str, lines: Sequence[str]) -> None:
        """Write a block that may be cut before each of its lines."""
        self.add(kind, "\n".join(lines), breaks=line_starts(lines))

    def table(
        self, rows: Sequence[Sequence[str]], headers: int, header: str = "", pages: Sequence[tuple[int, int]] = ()
    ) -> None:
        """A row per line, its cells between bars; cut between rows only, the first row of data stays with the header.

        `headers` rows are the header; where there is none, `header` may be that of a table above. `pages`: the pages that
        the rows are on, and how many on each; then no row is blank.
        """
        lines = [line for row in rows if (line := _row(row))]
        headers = sum(bool(_row(row)) for row in rows[:headers])
        above = "\n".join(lines[:headers]) or header
        starts = (0, *line_starts(lines))
        firsts = accumulate((count for _, count in pages), initial=0)
        turns = [(starts[first], page) for (page, _), first in zip(pages, firsts, strict=False)]
        self.add("table", "\n".join(lines), header=above, breaks=starts[1:][headers:], pages=turns)

    def page(self, number: int) -> None:
        """What comes next is on this page."""
        self._pages[self.length + 2 if self._parts else 0] = number

    def embed(self, document: ParsedDocument) -> None:
        """Write a whole document below `path`, with its own headings and pages."""
        if not document.text or document.text.isspace():
            return
        start = self._begin()
        self._write(document.text)
        blocks = document.blocks or (Block("paragraph", 0, len(document.text)),)
        for b in blocks:
            path, breaks = self.path + b.headings, tuple(start + offset for offset in b.breaks)
            self._blocks.append(b._replace(start=start + b.start, end=start + b.end, headings=path, breaks=breaks))
        self._pages |= {start + anchor.start: anchor.page for anchor in document.anchors}
        self._pages[self.length] = None
        self.warnings += document.warnings

    def document(self, title: str = "") -> ParsedDocument:
        """All of it."""
        text = "".join(self._parts)
        pages = {min(start, len(text)): page for start, page in self._pages.items()}
        changes = {anchor.start: anchor.headings for anchor in anchors_of(self._blocks)}
        anchors: list[Anchor] = []
        page: int | None = None
        headings: tuple[str, ...] = ()
        for start in sorted({*pages, *changes}):
            page, headings = pages.get(start, page), changes.get(start, headings)
            if not anchors or (page, headings) != (anchors[-1].page, anchors[-1].headings):
                anchors.append(Anchor(start, page, headings))
        return ParsedDocument(text, tuple(self._blocks), tuple(anchors), title, tuple(self.warnings))

    def _begin(self) -> int:
        if self._parts:
            self._write("\n\n")
        return self.length

    def _write(self, text: str) -> None:
        self._parts.append(text)
        self.length += len(text)


def line_starts(lines: Sequence[str]) -> tuple[int, ...]:
    """Offsets of all lines but the first in the text that they make."""
    starts: list[int] = []
    offset = 0
    for line in lines[:-1]:
        offset += len(line) + 1
        starts.append(offset)
    return tuple(starts)


def _row(cells: Sequence[str]) -> str:
    last = max((index for index, cell in enumerate(cells, 1) if cell), default=0)
    return " | ".join(cells[:last])
