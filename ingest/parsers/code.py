"""Source code. tree-sitter finds definitions and statements; the file's own text is the document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tree_sitter import Node

from ingest.encoding import decode
from ingest.languages import LANGUAGES, language_of
from ingest.parsers.outline import anchors_of
from ingest.parsers.syntax import Syntax, grammar_of, parsed, text_of
from ingest.parsers.text import line_blocks
from storage.types import Block, ParsedDocument

_BIG = 1500  # bytes above which a statement is opened to look for breaks inside it
_DEPTH = 6  # classes within classes
_WIDE = 400  # bytes: what stands further to the right does not begin its line


@dataclass(frozen=True)
class CodeParser:
    """Functions and classes are definitions, a class by its members; what stands between them is code.

    A file in a language whose grammar is not installed is read line by line.
    """

    name: str = "code"
    version: int = 3

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        text = decode(data)
        blocks = _outline(text, language_of(data, name)) or line_blocks(text)
        return ParsedDocument(text, tuple(blocks), anchors_of(blocks))


def _outline(text: str, language: str | None) -> list[Block]:
    grammar = grammar_of(language) if language is not None else None
    if grammar is None or language is None:
        return []
    raw = text.encode("utf-8")
    tree = parsed(grammar, raw)
    if tree is None:
        return []
    outline = _CodeOutline(raw, Syntax.of(LANGUAGES[language]))
    outline.partition(outline.syntax.flat(tree.root_node.children), 0, len(raw), (), "")
    return outline.in_characters(text)


@dataclass
class _CodeOutline:
    """Blocks in bytes, as tree-sitter counts them."""

    raw: bytes
    syntax: Syntax
    blocks: list[Block] = field(default_factory=list)

    def partition(
        self, nodes: Sequence[Node], start: int, end: int, path: tuple[str, ...], header: str, depth: int = 0
    ) -> None:
        """Blocks for [start, end): a definition reaches from its comments to its last line."""
        position = start
        between: list[Node] = []  # since the last definition
        prelude: Node | None = None  # the first of the comments and attributes directly above
        for before, node in zip([None, *nodes], nodes, strict=False):
            touching = before is not None and _touches(before, node)
            if self.syntax.is_prelude(node):
                prelude = prelude if prelude is not None and touching else node
            elif (definition := self.syntax.definition_in(node)) is not None:
                first = prelude if prelude is not None and touching else node
                begin = max(position, self._line_start(first))
                stop = min(end, self._line_end(node.end_byte))
                self._code(between, position, begin, path, header)
                self._definition(node, definition, begin, stop, path, header, depth)
                position, prelude, between = max(begin, stop), None, []
                continue
            else:
                prelude = None
            between.append(node)
        self._code(between, position, end, path, header)

    def _definition(
        self, outer: Node, node: Node, start: int, end: int, path: tuple[str, ...], header: str, depth: int
    ) -> None:
        """`outer` is `node`, or what wraps it."""
        opened = self.syntax.kind(node) in self.syntax.containers
        line = self._head(outer, node)
        name = self._name(outer, node) or line[:80]
        within = (*path, name) if opened else path
        inner = "\n".join(part for part in (header, line) if part)
        members = self.syntax.members(node) if opened and depth < _DEPTH else []
        begun = next((i for i, member in enumerate(members) if self.syntax.definition_in(member) is not None), None)
        if begun is None:
            self._add("definition", start, end, within, inner, _statements(node, self.raw), "" if opened else name)
            return
        while begun and self.syntax.is_prelude(members[begun - 1]) and _touches(members[begun - 1], members[begun]):
            begun -= 1
        # The class line, its docstring and fields: everything up to the first member that is a definition.
        first = max(start, self._line_start(members[begun]))
        self._add("definition", start, first, within, inner, _statements(node, self.raw, until=first))
        self.partition(members[begun:], first, end, within, inner, depth + 1)

    def _head(self, outer: Node, node: Node) -> str:
        """A definition's first line or lines, without what opens its body."""
        body = node.child_by_field_name("body")
        name = self.syntax.name_of(outer, node)
        stop = self.raw.find(b"\n", name.end_byte if name is not None else node.start_byte)
        if body is not None and body.type not in self.syntax.groups:
            stop = body.start_byte
        begin = node.start_byte - min(node.start_point[1], _WIDE)  # with "export" or "public" before it
        stop = min(stop if stop >= 0 else node.end_byte, begin + 2 * _WIDE)
        line = self.raw[begin:stop].decode("utf-8", "ignore")
        return " ".join(line.split()).rstrip("{").strip()

    def _name(self, outer: Node, node: Node) -> str:
        found = self.syntax.name_of(outer, node)
        return text_of(found) if found is not None else ""

    def _code(self, nodes: Sequence[Node], start: int, end: int, path: tuple[str, ...], header: str) -> None:
        inside = [node for node in nodes if start <= node.start_byte < end]
        breaks = sorted({offset for node in inside for offset in _statements(node, self.raw, own=True)})
        self._add("code", start, end, path, header, breaks)

    def _add(
        self, kind: str, start: int, end: int, path: tuple[str, ...], header: str, breaks: Sequence[int], name: str = ""
    ) -> None:
        """A block without the blank lines around it; nothing where it is blank."""
        piece = self.raw[start:end]
        if not piece.strip():
            return
        first = start + len(piece) - len(piece.lstrip())
        line = self.raw.rfind(b"\n", start, first) + 1 or start
        begin, stop = line, start + len(piece.rstrip())
        inside = tuple(offset for offset in breaks if begin < offset < stop)
        self.blocks.append(Block(kind, begin, stop, path, header, inside, name))

    def _line_start(self, node: Node) -> int:
        """The start of a node's line, if nothing but indentation stands before it there."""
        line = _line_of(node, self.raw)
        return node.start_byte if line is None else line

    def _line_end(self, offset: int) -> int:
        """Past what closes a definition on its own line: a semicolon, a comment."""
        line = self.raw.find(b"\n", offset)
        rest = self.raw[offset : len(self.raw) if line < 0 else line]
        closes = not rest.strip(b" \t;,)") or rest.lstrip(b" \t;").startswith((b"//", b"#", b"/*"))
        return offset + len(rest) if closes and b"*/" not in rest[:-2].rstrip() else offset

    def in_characters(self, text: str) -> list[Block]:
        if len(text) == len(self.raw):
            return self.blocks
        offsets = sorted({o for block in self.blocks for o in (block.start, block.end, *block.breaks)})
        where = {0: 0}
        for before, offset in pairwise([0, *offsets]):
            where[offset] = where[before] + len(self.raw[before:offset].decode("utf-8"))
        return [
            b._replace(start=where[b.start], end=where[b.end], breaks=tuple(where[o] for o in b.breaks)) for b in self.blocks
        ]


def _touches(upper: Node, lower: Node) -> bool:
    return lower.start_point[0] - upper.end_point[0] <= 1


def _line_of(node: Node, raw: bytes) -> int | None:
    """The start of the line that a node begins; None if other text stands before it."""
    column = node.start_point[1]
    line = node.start_byte - column
    return line if column <= _WIDE and not raw[line : node.start_byte].strip() else None


def _statements(node: Node, raw: bytes, *, own: bool = False, until: int | None = None) -> list[int]:
    """Offsets of lines that begin with a statement (any named node); only large ones are looked into."""
    found: set[int] = set()
    stack = [(node, own)]
    while stack:
        current, counted = stack.pop()
        if until is not None and current.start_byte >= until:
            continue
        if counted:
            line = _line_of(current, raw)
            if line is not None:
                found.add(line)
        if current.end_byte - current.start_byte > _BIG or not counted:
            stack.extend((child, True) for child in _inner(current))
    return sorted(found)


def _inner(node: Node) -> list[Node]:
    body = node.child_by_field_name("body")
    return body.named_children if body is not None else node.named_children
