"""HTML. The document is the text a reader sees, a blank line between blocks; no scripts, no hidden parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from selectolax.lexbor import LexborHTMLParser

from ingest.encoding import decode
from ingest.parsers.outline import Mark, Outline, anchors_of
from storage.types import Block, ParsedDocument

_DROPPED = "script style template noscript svg math iframe object embed canvas audio video head".split()
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.I)
_BLOCKS = frozenset(
    "address article aside blockquote body button caption center dd details dialog div dl dt fieldset "
    "figcaption figure footer form header hgroup hr html legend li main nav ol option p section select "
    "summary table tbody td tfoot th thead tr ul h1 h2 h3 h4 h5 h6".split()
)
_HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
_LISTS = frozenset({"ul", "ol", "menu"})
_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w-]{2,40})", re.I)

# selectolax ships no types: a node has tag, child, next, parent, attributes, text().
_Node = Any


@dataclass(frozen=True)
class HtmlParser:
    """Headings, lists, tables and preformatted text become blocks of their kind; all else is paragraphs."""

    name: str = "html"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        declared = _CHARSET.search(data[:4096])
        tree = LexborHTMLParser(decode(data, declared[1].decode("ascii") if declared else None))
        title_node = tree.css_first("title")
        title = " ".join(title_node.text().split()) if title_node is not None else ""
        tree.strip_tags(_DROPPED)
        page = _Page(layout=_layout_tables(tree))
        if tree.body is not None:
            _walk(tree.body, page)
        page.close_list()
        text = "".join(page.parts)
        return ParsedDocument(text, tuple(page.blocks), anchors_of(page.blocks), title)


@dataclass
class _Page:
    """The text written so far, its blocks, and the inline text not yet written."""

    layout: frozenset[int]
    parts: list[str] = field(default_factory=list)
    length: int = 0
    blocks: list[Block] = field(default_factory=list)
    outline: Outline = field(default_factory=Outline)
    inline: list[str] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    markers: list[int | None] = field(
        default_factory=list
    )  # per open list: the next number, or None for bullets
    marker: str = ""

    def add(self, kind: str, text: str, *, header: str = "", breaks: tuple[int, ...] = ()) -> None:
        """Write a block; `breaks` count from its start."""
        if not text or text.isspace():
            return
        if self.parts:
            self._write("\n\n")
        start = self.length
        self._write(text)
        shifted = tuple(start + offset for offset in breaks)
        self.blocks.append(Block(kind, start, self.length, self.outline.path, header, shifted))

    def _write(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)

    def flush(self) -> None:
        """End the paragraph or list item in hand."""
        text = self._take()
        if not text:
            return
        if self.markers:
            indent = "  " * (len(self.markers) - 1)
            self.items.append(indent + self.marker + text)
            self.marker = " " * len(self.marker)
        else:
            self.add("paragraph", text)

    def _take(self) -> str:
        lines = (" ".join(line.split()) for line in "".join(self.inline).split("\0"))
        self.inline.clear()
        return "\n".join(line for line in lines if line)

    def heading(self, level: int) -> None:
        title = self._take()
        if title:
            self.close_list()
            self.outline.enter(Mark("level", level), " ".join(title.split()))
            self.add("heading", title)

    def begin_item(self) -> None:
        if self.markers:
            number = self.markers[-1]
            self.marker = "- " if number is None else f"{number}. "
            self.markers[-1] = None if number is None else number + 1

    def close_list(self) -> None:
        """Write the list in hand, be it finished or interrupted by a table."""
        self.flush()
        if self.items:
            self.add("list", "\n".join(self.items), breaks=_line_starts(self.items))
            self.items.clear()


def _line_starts(lines: list[str]) -> tuple[int, ...]:
    starts: list[int] = []
    offset = 0
    for line in lines[:-1]:
        offset += len(line) + 1
        starts.append(offset)
    return tuple(starts)


def _walk(body: _Node, page: _Page) -> None:
    """Visit every node in order, without recursion: pages nest thousands deep."""
    node, entering = body, True
    while True:
        if entering and _enter(node, page) and node.child is not None:
            node = node.child
            continue
        _leave(node, page)
        if node.mem_id == body.mem_id:  # `==` would compare their markup
            return
        following = node.next
        node, entering = (following, True) if following is not None else (node.parent, False)


def _enter(node: _Node, page: _Page) -> bool:
    """Take in what stands at a node's start; False if its children are done with."""
    tag = node.tag
    if tag == "-text":
        page.inline.append(node.text_content or "")
        return False
    if tag is None or tag[0] in "-!" or _is_hidden(node):
        return False
    if tag == "br":
        page.inline.append("\0")
    elif tag in _BLOCKS or tag in _LISTS:
        page.flush()
    if tag in _LISTS:
        page.markers.append(1 if tag == "ol" else None)
    elif tag == "li":
        page.begin_item()
    elif tag == "pre":
        page.close_list()
        _add_preformatted(node.text(), page)
        return False
    elif tag == "table" and node.mem_id not in page.layout:
        page.close_list()
        _add_table(node, page)
        return False
    return True


def _leave(node: _Node, page: _Page) -> None:
    tag = node.tag
    if tag in _HEADINGS:
        page.heading(int(tag[1]))
    elif tag in _LISTS:
        page.flush()
        if page.markers:
            page.markers.pop()
        if not page.markers:
            page.close_list()
    elif tag in _BLOCKS:
        page.flush()


def _is_hidden(node: _Node) -> bool:
    attributes = node.attributes
    return bool(attributes) and (
        "hidden" in attributes or bool(_HIDDEN.search(attributes.get("style") or ""))
    )


def _add_preformatted(text: str, page: _Page) -> None:
    text = text.replace("\r\n", "\n").strip("\n").rstrip()
    page.add("code", text, breaks=_line_starts(text.split("\n")))


def _add_table(table: _Node, page: _Page) -> None:
    """A row per line, its cells between bars; the header is the rows of `th` above the first row of data."""
    rows: list[str] = []
    headers = 0
    for row in _rows(table):
        cells = [cell for cell in _children(row) if cell.tag in {"td", "th"}]
        texts = [" ".join(cell.text(separator=" ").split()) for cell in cells if not _is_hidden(cell)]
        if not any(texts):
            continue
        if headers == len(rows) and all(cell.tag == "th" for cell in cells):
            headers += 1
        rows.append(" | ".join(texts))
    caption = table.css_first("caption")
    if caption is not None:
        page.add("paragraph", " ".join(caption.text(separator=" ").split()))
    page.add("table", "\n".join(rows), header="\n".join(rows[:headers]), breaks=_line_starts(rows)[headers:])


def _layout_tables(tree: LexborHTMLParser) -> frozenset[int]:
    """Tables around other tables: they place things on the page, and their cells are read as plain blocks."""
    found: set[int] = set()
    for inner in tree.css("table table"):
        outer = inner.parent
        while outer is not None and outer.tag != "table":
            outer = outer.parent
        if outer is not None:
            found.add(outer.mem_id)
    return frozenset(found)


def _rows(table: _Node) -> Iterator[_Node]:
    return (row for row in table.css("tr") if not _is_hidden(row))


def _children(node: _Node) -> Iterator[_Node]:
    child = node.child
    while child is not None:
        yield child
        child = child.next
