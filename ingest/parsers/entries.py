"""Data files by their entries: small ones stay whole, a big one is opened and its key heads its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ingest.encoding import decode
from ingest.parsers.outline import anchors_of
from storage.types import Block, ParsedDocument

BIG = 1500  # characters of an entry that is opened
DEPTH = 6  # of entries in entries; what lies deeper is cut by lines


@dataclass(slots=True)
class Entry:
    """A key and what stands under it, [start, end) in characters. `children` are needed where it is BIG only."""

    key: str
    start: int
    end: int
    children: list[Entry] = field(default_factory=list)


def read_entries(data: bytes, structure: Callable[[str], Sequence[Block]]) -> ParsedDocument:
    """The document of a file whose own text is its text. Raises FileError."""
    text = decode(data)
    blocks = structure(text)
    return ParsedDocument(text, tuple(blocks), anchors_of(blocks))


def entry_blocks(text: str, entries: Sequence[Entry]) -> list[Block]:
    """Blocks that cover `text`: runs of small entries with a break before each, big ones under their key."""
    return list(_blocks(text, entries, 0, len(text), ()))


def _blocks(
    text: str, entries: Sequence[Entry], start: int, end: int, path: tuple[str, ...]
) -> Iterator[Block]:
    begun, breaks = start, list[int]()
    for index, entry in enumerate(entries):
        if entry.end - entry.start <= BIG or not entry.children:
            breaks.append(entry.start)
            continue
        opens = begun  # what only opens the entry's own parent stands with it
        if breaks:
            yield from _run(text, begun, entry.start, path, breaks)
            opens = entry.start
        begun = entries[index + 1].start if index + 1 < len(entries) else end
        yield from _blocks(text, entry.children, opens, begun, (*path, entry.key))
        breaks = []
    yield from _run(text, begun, end, path, breaks)


def _run(text: str, start: int, end: int, path: tuple[str, ...], breaks: Sequence[int]) -> Iterator[Block]:
    """The block of [start, end) without the blanks around it, which may be none."""
    piece = text[start:end]
    kept = piece.rstrip()
    if kept:
        begin, stop = start + len(piece) - len(piece.lstrip()), start + len(kept)
        begin = max(start, text.rfind("\n", start, begin) + 1)  # its first line keeps its indentation
        yield Block("code", begin, stop, path, "", tuple(b for b in breaks if begin < b < stop))


def with_comments(text: str, start: int, after: int, markers: tuple[str, ...]) -> int:
    """Where an entry begins that starts at `start`: at its line, or at the comment lines directly above."""
    begin = max(after, text.rfind("\n", after, start) + 1)
    while begin > after:
        line = max(after, text.rfind("\n", after, begin - 1) + 1)
        if not text[line:begin].lstrip().startswith(markers):
            break
        begin = line
    return begin
