"""Plain text, and for now every other file of text: its own lines are its structure."""

from __future__ import annotations

from dataclasses import dataclass

from ingest.encoding import decode
from ingest.languages import suffix_of
from ingest.parsers.outline import Outline, anchors_of
from ingest.parsers.prose import Lines, prose_blocks
from storage.types import Block, ParsedDocument

# Formats in which a line is a record, and a number at its start is no heading.
_RECORDS = frozenset(
    "csv tsv json jsonl ndjson yaml yml toml xml ini cfg conf log sql css svg properties env".split()
)
_TABLES = frozenset({"csv", "tsv"})


@dataclass(frozen=True)
class TextParser:
    """The decoded file is the document; spans refer to it."""

    name: str = "text"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        text = decode(data)
        source = Lines.of(text)
        suffix = suffix_of(name)
        if suffix in _TABLES:
            blocks = _table(source)
        elif suffix in _RECORDS:
            blocks = line_blocks(text)
        else:
            blocks = prose_blocks(source, 0, len(source.lines), Outline(), plain=True)
        title = blocks[0].headings[-1] if blocks and blocks[0].kind == "heading" else ""
        return ParsedDocument(text, tuple(blocks), anchors_of(blocks), title)


def _table(source: Lines) -> list[Block]:
    """One table; rows are its breaks, but the first row of data stays with the header."""
    filled = [index for index, line in enumerate(source.lines) if line.strip()]
    if not filled:
        return []
    breaks = tuple(source.starts[index] for index in filled[2:])
    first, last = filled[0], filled[-1]
    return [Block("table", source.starts[first], source.end(last), (), source.lines[first], breaks)]


def line_blocks(text: str) -> list[Block]:
    """A block per run of lines without a blank one; each line may be cut off."""
    source = Lines.of(text)
    blocks: list[Block] = []
    begun = -1
    for index, line in enumerate((*source.lines, "")):
        if line.strip():
            begun = index if begun < 0 else begun
        elif begun >= 0:
            breaks = source.starts[begun + 1 : index]
            blocks.append(Block("code", source.starts[begun], source.end(index - 1), (), "", breaks))
            begun = -1
    return blocks
