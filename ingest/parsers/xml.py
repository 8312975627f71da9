"""XML. The file's own text, tags and all, is the document; its elements are the structure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn
from xml.parsers import expat

from ingest.encoding import decode
from ingest.parsers.entries import DEPTH, Entry, entry_blocks
from ingest.parsers.outline import anchors_of
from ingest.parsers.text import line_blocks
from storage.types import Block, ParsedDocument

_ENCODING = re.compile(rb"<\?xml[^>]{0,100}?encoding\s*=\s*[\"']([\w.-]{2,40})")
_NAMES = ("id", "name", "key", "title")


@dataclass(frozen=True)
class XmlParser:
    """Headings are the elements too big to stay whole, with the attribute that tells them from their like.

    Entities are never declared, so none is fetched and none grows: a file that declares any is read by lines,
    and so is one that is not well formed.
    """

    name: str = "xml"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        declared = _ENCODING.match(data.lstrip()[:200])
        text = decode(data, declared[1].decode("ascii") if declared else None)
        blocks = _structure(text)
        return ParsedDocument(text, tuple(blocks), anchors_of(blocks))


class _Entity(Exception):
    """The file declares an entity."""


@dataclass
class _Elements:
    """Entries in bytes of UTF-8, as expat counts them."""

    parser: Any
    stack: list[Entry] = field(default_factory=lambda: [Entry("", 0, 0)])
    depth: int = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth <= DEPTH:
            label = next((attributes[name] for name in _NAMES if name in attributes), "")
            at = self.parser.CurrentByteIndex
            self.stack.append(Entry(f"{tag} {label[:80]}".strip(), at, at))

    def end(self, tag: str) -> None:
        if self.depth <= DEPTH:
            closed = self.stack.pop()
            closed.end = self.parser.CurrentByteIndex
            self.stack[-1].children.append(closed)
        self.depth -= 1

    def declared(self, *_: object) -> NoReturn:
        raise _Entity


def _structure(text: str) -> list[Block]:
    raw = text.encode("utf-8")
    parser = expat.ParserCreate("utf-8")
    elements = _Elements(parser)
    parser.StartElementHandler = elements.start
    parser.EndElementHandler = elements.end
    parser.EntityDeclHandler = elements.declared
    try:
        parser.Parse(raw, True)
    except (expat.ExpatError, _Entity):
        return line_blocks(text)
    root = elements.stack[0]
    if len(raw) != len(text):
        _in_characters(root, raw)
    # The root element holds everything: its children are the file's entries.
    return entry_blocks(text, root.children[0].children if root.children else [])


def _in_characters(root: Entry, raw: bytes) -> None:
    entries, stack = list[Entry](), [root]
    while stack:
        entry = stack.pop()
        entries.append(entry)
        stack += entry.children
    offsets = sorted({offset for entry in entries for offset in (entry.start, entry.end)})
    where = {0: 0}
    for before, offset in pairwise([0, *offsets]):
        where[offset] = where[before] + len(raw[before:offset].decode("utf-8"))
    for entry in entries:
        entry.start, entry.end = where[entry.start], where[entry.end]
