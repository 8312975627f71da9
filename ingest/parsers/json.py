"""JSON, and JSON Lines. The file's own text is the document; keys and elements are its structure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from ingest.parsers.entries import BIG, DEPTH, Entry, entry_blocks, read_entries
from ingest.parsers.text import line_blocks
from storage.types import Block, ParsedDocument

_DECODER = json.JSONDecoder(parse_int=float)  # an integer of any length is read, and then forgotten
_BLANK = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class JsonParser:
    """Headings are the keys, and `[n]` for elements, of what is too big to stay whole. What is not JSON is lines."""

    name: str = "json"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        return read_entries(data, _structure)


def _structure(text: str) -> list[Block]:
    start = _skip(text, 0)
    try:
        _, end = _DECODER.raw_decode(text, start)
        if _skip(text, end) == len(text):
            return entry_blocks(text, _children(text, start, 0))
        return entry_blocks(text, _lines(text))
    except (ValueError, RecursionError):
        return line_blocks(text)


def _lines(text: str) -> list[Entry]:
    """JSON Lines: a value per line. Raises ValueError."""
    entries: list[Entry] = []
    start = 0
    for line in text.split("\n"):
        if line.strip():
            if not entries:
                _DECODER.decode(line)
            children = _children(text, _skip(text, start), 1) if len(line) > BIG else []
            entries.append(Entry(f"[{len(entries)}]", start, start + len(line), children))
        start += len(line) + 1
    return entries


def _children(text: str, at: int, depth: int) -> list[Entry]:
    """The members of the object or array at `at`; none of a scalar. Raises ValueError where it is not sound."""
    entries: list[Entry] = []
    named = text[at : at + 1] == "{"
    if depth >= DEPTH or text[at : at + 1] not in ("{", "["):
        return entries
    position = _skip(text, at + 1)
    while text[position : position + 1] not in ("}", "]", ""):
        start, key = position, f"[{len(entries)}]"
        if named:
            key, position = _DECODER.raw_decode(text, position)
            position = _skip(text, _skip(text, position) + 1)  # the colon
        _, end = _DECODER.raw_decode(text, position)
        children = _children(text, position, depth + 1) if end - start > BIG else []
        entries.append(Entry(str(key), start, end, children))
        position = _skip(text, end)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
    return entries


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at
