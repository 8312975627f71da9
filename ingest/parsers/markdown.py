"""Markdown. Its line maps give the structure; the file's own text, markup and all, is the document."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token

from ingest.encoding import decode
from ingest.parsers.markdown_plain import PLAIN, Plain, QuickBlocks, plain_rule
from ingest.parsers.outline import Mark, Outline, anchors_of
from ingest.parsers.prose import Lines, prose_blocks
from storage.types import Block, ParsedDocument

_FRONT = re.compile(r"---[ \t]*\n(?:[^\n]*\n)*?(?:---|\.\.\.)[ \t]*(?:\n|$)")
_KINDS = {"fence": "code", "code_block": "code", "table_open": "table", "bullet_list_open": "list",
          "ordered_list_open": "list"}  # fmt: skip


@dataclass(frozen=True)
class MarkdownParser:
    """Headings, paragraphs, lists, tables, code. Inline markup is left as it is written. What is plain is found by a rule of
    ours, which is quick (`markdown_plain.py`), everything else by markdown-it."""

    name: str = "markdown"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        text = decode(data)
        blocks = markdown_blocks(text, Outline())
        title = next((b.headings[-1] for b in blocks if b.kind == "heading"), "")
        return ParsedDocument(text, tuple(blocks), anchors_of(blocks), title)


def markdown_blocks(text: str, outline: Outline) -> list[Block]:
    """The blocks of a Markdown text that stands under the headings of `outline`, which goes on from it."""
    source = Lines.of(text)
    front = _FRONT.match(text)
    skipped = front[0].rstrip("\n").count("\n") + 1 if front else 0
    body = text if front is None else "\n" * skipped + text[source.starts[skipped] :]
    blocks = [Block("code", 0, source.end(skipped - 1), ())] if front else []
    for tokens in _top_level(_reader().parse(body)):
        if tokens[0].type == PLAIN:
            for plain in tokens[0].meta[PLAIN]:
                blocks += _plain_blocks(source, plain, outline)
        else:
            blocks += _blocks(source, tokens, outline)
    return blocks


@functools.cache
def _reader() -> MarkdownIt:
    reader = MarkdownIt("commonmark")
    reader.block = QuickBlocks()
    reader.configure("commonmark").enable("table").disable("reference")
    # Blocks only: inline parsing costs time for nothing, and "normalize" would shift the line maps.
    reader.core.ruler.enableOnly(["block"])
    reader.block.ruler.before("table", PLAIN, plain_rule)
    return reader


def _top_level(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """The tokens of each outermost block."""
    begun = 0
    for index, token in enumerate(tokens):
        if token.level == 0 and token.nesting <= 0:
            yield tokens[begun : index + 1]
            begun = index + 1


def _blocks(source: Lines, tokens: Sequence[Token], outline: Outline) -> list[Block]:
    head = tokens[0]
    if head.map is None:
        return []
    first, last = _trimmed(source, *head.map)
    if first >= last:
        return []
    if head.type == "heading_open":
        path = outline.enter(Mark("level", int(head.tag[1])), tokens[1].content)
        return [Block("heading", source.starts[first], source.end(last - 1), path)]
    if head.type == "paragraph_open" or _is_numbered_line(tokens):
        return prose_blocks(source, first, last, outline, plain=False)
    kind = _KINDS.get(head.type, "paragraph")
    header = _table_header(source, tokens) if kind == "table" else ""
    breaks = tuple(source.starts[line] for line in _break_lines(tokens, first, last))
    return [Block(kind, source.starts[first], source.end(last - 1), outline.path, header, breaks)]


def _plain_blocks(source: Lines, plain: Plain, outline: Outline) -> list[Block]:
    if plain.kind == "paragraph":
        return prose_blocks(source, plain.first, plain.last, outline, plain=False)
    path = outline.enter(Mark("level", plain.level), plain.title) if plain.kind == "heading" else outline.path
    breaks = tuple(source.starts[line] for line in plain.items)
    return [Block(plain.kind, source.starts[plain.first], source.end(plain.last - 1), path, "", breaks)]


def _trimmed(source: Lines, first: int, last: int) -> tuple[int, int]:
    last = min(last, len(source.lines))
    while last > first and not source.lines[last - 1].strip():
        last -= 1
    return first, last


def _is_numbered_line(tokens: Sequence[Token]) -> bool:
    """A list of one numbered item is how Markdown sees "1. Definitions" above its clauses."""
    items = sum(token.type == "list_item_open" for token in tokens)
    paragraphs = sum(token.type == "paragraph_open" for token in tokens)
    return tokens[0].type == "ordered_list_open" and items == 1 and paragraphs == 1


def _table_header(source: Lines, tokens: Sequence[Token]) -> str:
    for token in tokens:
        if token.type == "thead_open" and token.map:
            return "\n".join(source.lines[token.map[0] : token.map[1] + 1])
    return ""


def _break_lines(tokens: Sequence[Token], first: int, last: int) -> list[int]:
    """Lines before which a block may be cut: items, rows after the first, lines of code inside the fence."""
    kind = tokens[0].type
    if kind == "fence":
        return list(range(first + 2, last - 1))
    if kind in {"code_block", "html_block"}:
        return list(range(first + 1, last))
    if kind == "table_open":
        rows = [token.map[0] for token in tokens if token.type == "tr_open" and token.map]
        return rows[2:]
    starts = {
        token.map[0] for token in tokens[1:] if token.map and token.nesting >= 0 and token.type != "inline"
    }
    return sorted(line for line in starts if first < line < last)
