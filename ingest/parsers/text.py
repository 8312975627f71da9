"""Plain text, and every other file of text: its own lines are its structure."""

from __future__ import annotations

from dataclasses import dataclass

from ingest.encoding import decode
from ingest.languages import suffix_of
from ingest.parsers.outline import Outline, anchors_of
from ingest.parsers.prose import Lines, prose_blocks
from storage.types import Block, ParsedDocument

# Formats in which a line is a record or a statement, and a number at its start is no heading.
_LINES = frozenset(
    "log svg vue svelte r dart vb vbs bat cmd clj erl proto graphql m mat asm s tex bib diff patch ipynb v sv vhd".split()
)


@dataclass(frozen=True)
class TextParser:
    """The decoded file is the document; spans refer to it."""

    name: str = "text"
    version: int = 2

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        text = decode(data)
        if suffix_of(name) in _LINES:
            blocks = line_blocks(text)
        else:
            source = Lines.of(text)
            blocks = prose_blocks(source, 0, len(source.lines), Outline(), plain=True)
        title = blocks[0].headings[-1] if blocks and blocks[0].kind == "heading" else ""
        return ParsedDocument(text, tuple(blocks), anchors_of(blocks), title)


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
