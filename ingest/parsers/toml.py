"""TOML. The file's own text is the document, its tables the structure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ingest.parsers.entries import Entry, entry_blocks, read_entries, with_comments
from ingest.parsers.text import line_blocks
from storage.types import Block, ParsedDocument

_TABLE = re.compile(r"^[ \t]*\[\[?[^\n]+\]\]?[ \t]*(?:#[^\n]*)?$", re.M)
_LINE = re.compile(r"^[^\s#;][^\n]*", re.M)


@dataclass(frozen=True)
class TomlParser:
    """A table is an entry; the name of one too big to stay whole heads its parts. What is not TOML is lines."""

    name: str = "toml"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        return read_entries(data, _structure)


def _structure(text: str) -> list[Block]:
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError):
        return line_blocks(text)
    tables = set(_paths(tree))
    named = ((match.start(), _names(match[0])) for match in _TABLE.finditer(text))
    return sections(text, [(start, ".".join(names)) for start, names in named if names in tables], ("#",))


def _names(line: str) -> tuple[str, ...]:
    """The name of the table that a line seems to begin: it may as well be part of an array or a text."""
    try:
        return max(_paths(tomllib.loads(line)), key=len)
    except ValueError:
        return ()


def _paths(tree: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Where the tables in this one are; a table in an array has the array's name."""
    stack: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, dict):
            if path:
                yield path
            stack += [((*path, name), value) for name, value in node.items()]
        elif isinstance(node, list):
            stack += [(path, value) for value in node]


def sections(text: str, found: list[tuple[int, str]], comments: tuple[str, ...]) -> list[Block]:
    """Blocks of a file whose named sections begin at these offsets; what comes before the first has no name."""
    starts = [with_comments(text, start, 0, comments) for start, _ in found]
    entries = _lines(text, 0, starts[0] if starts else len(text))
    for (start, end), (_, key) in zip(pairwise([*starts, len(text)]), found, strict=True):
        entries.append(Entry(key, start, end, _lines(text, start + 1, end)))
    return entry_blocks(text, entries)


def _lines(text: str, start: int, end: int) -> list[Entry]:
    """Keys without a name: cuts only."""
    starts = [match.start() for match in _LINE.finditer(text, start, end)]
    return [Entry("", first, last) for first, last in pairwise([*starts, end])]
