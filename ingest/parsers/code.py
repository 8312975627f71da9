"""Source code. tree-sitter finds definitions and statements; the file's own text is the document."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise

from tree_sitter import Language, Node, Parser

from ingest.detect import language_of
from ingest.encoding import decode
from ingest.parsers.outline import anchors_of
from storage.types import Block, ParsedDocument

# language → (module of its grammar, function in it)
_GRAMMARS = {
    "python": ("tree_sitter_python", "language"),
    "javascript": ("tree_sitter_javascript", "language"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "java": ("tree_sitter_java", "language"),
    "go": ("tree_sitter_go", "language"),
    "c": ("tree_sitter_c", "language"),
    "cpp": ("tree_sitter_cpp", "language"),
    "rust": ("tree_sitter_rust", "language"),
}
_CONTAINERS = frozenset(
    "class_definition class_declaration abstract_class_declaration interface_declaration enum_declaration "
    "record_declaration class_specifier struct_specifier namespace_definition internal_module impl_item "
    "trait_item mod_item".split()
)
_DEFINITIONS = _CONTAINERS | frozenset(
    "function_definition function_declaration generator_function_declaration method_definition "
    "method_declaration constructor_declaration function_item struct_item enum_item union_item "
    "macro_definition type_declaration type_alias_declaration union_specifier enum_specifier "
    "function_signature_item".split()
)
# Nodes around a definition, and where in them it stands.
_WRAPPERS = frozenset({"decorated_definition", "export_statement", "template_declaration", "declaration"})
_PRELUDE = re.compile(r"comment|attribute_item|decorator")
_BIG = 1500  # bytes above which a statement is opened to look for breaks inside it
_DEPTH = 6  # classes within classes


@dataclass(frozen=True)
class CodeParser:
    """Functions and classes are definitions, a class by its members; what stands between them is code."""

    name: str = "code"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        text = decode(data)
        module, function = _GRAMMARS[language_of(data, name)]
        raw = text.encode("utf-8")
        grammar: Callable[[], object] = getattr(import_module(module), function)
        tree = Parser(Language(grammar())).parse(raw)
        outline = _CodeOutline(raw)
        outline.partition(tree.root_node.children, 0, len(raw), (), "")
        blocks = outline.in_characters(text)
        return ParsedDocument(text, tuple(blocks), anchors_of(blocks))


@dataclass
class _CodeOutline:
    """Blocks in bytes, as tree-sitter counts them."""

    raw: bytes
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
            if _PRELUDE.search(node.type):
                prelude = prelude if prelude is not None and touching else node
            elif (definition := _definition_in(node)) is not None:
                first = prelude if prelude is not None and touching else node
                begin = max(position, self._line_start(first.start_byte))
                stop = min(end, self._line_end(node.end_byte))
                self._code(between, position, begin, path, header)
                self._definition(definition, begin, stop, path, header, depth)
                position, prelude, between = max(begin, stop), None, []
                continue
            else:
                prelude = None
            between.append(node)
        self._code(between, position, end, path, header)

    def _definition(
        self, node: Node, start: int, end: int, path: tuple[str, ...], header: str, depth: int
    ) -> None:
        body = node.child_by_field_name("body")
        members = [] if body is None or node.type not in _CONTAINERS or depth >= _DEPTH else body.children
        begins = [member for member in members if _definition_in(member) is not None]
        if not begins or body is None:
            own = (*path, name) if node.type in _CONTAINERS and (name := _name_of(node)) else path
            self._add("definition", start, end, own, header, _statements(node, self.raw))
            return
        begin = self.raw.rfind(b"\n", 0, node.start_byte) + 1  # with "export" or "public" before it
        line = self.raw[begin : body.start_byte].decode("utf-8", "replace").strip().rstrip("{").strip()
        inner = "\n".join(part for part in (header, " ".join(line.split())) if part)
        within = (*path, _name_of(node) or " ".join(line.split())[:80])
        # The class line, its docstring and fields: everything up to the first member that is a definition.
        first = max(start, self._line_start(_with_prelude(members, begins[0]).start_byte))
        self._add("definition", start, first, within, header, _statements(node, self.raw, until=first))
        self.partition([m for m in members if m.start_byte >= first], first, end, within, inner, depth + 1)

    def _code(self, nodes: Sequence[Node], start: int, end: int, path: tuple[str, ...], header: str) -> None:
        inside = [node for node in nodes if start <= node.start_byte < end]
        breaks = sorted({offset for node in inside for offset in _statements(node, self.raw, own=True)})
        self._add("code", start, end, path, header, breaks)

    def _add(
        self, kind: str, start: int, end: int, path: tuple[str, ...], header: str, breaks: Sequence[int]
    ) -> None:
        """A block without the blank lines around it; nothing where it is blank."""
        piece = self.raw[start:end]
        if not piece.strip():
            return
        first = self._line_start(start + len(piece) - len(piece.lstrip()))
        begin, stop = max(start, first), start + len(piece.rstrip())
        inside = tuple(offset for offset in breaks if begin < offset < stop)
        self.blocks.append(Block(kind, begin, stop, path, header, inside))

    def _line_start(self, offset: int) -> int:
        """The start of the line, if nothing but indentation stands before `offset` on it."""
        line = self.raw.rfind(b"\n", 0, offset) + 1
        return line if not self.raw[line:offset].strip() else offset

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
            Block(
                b.kind, where[b.start], where[b.end], b.headings, b.header, tuple(where[o] for o in b.breaks)
            )
            for b in self.blocks
        ]


def _definition_in(node: Node) -> Node | None:
    """The definition a node is, or wraps (decorator, export, template)."""
    inner: Node | None = node
    for _ in range(4):
        if inner is None or inner.type in _DEFINITIONS:
            break
        if inner.type not in _WRAPPERS:
            return None
        inner = (
            inner.child_by_field_name("definition")
            or inner.child_by_field_name("declaration")
            or inner.child_by_field_name("type")
            or next((child for child in inner.named_children if child.type in _DEFINITIONS), None)
        )
    if inner is None or inner.type not in _DEFINITIONS:
        return None
    # "struct point p;" names a type and defines nothing.
    return None if inner.type.endswith("_specifier") and inner.child_by_field_name("body") is None else inner


def _with_prelude(nodes: Sequence[Node], node: Node) -> Node:
    first = node
    for candidate in reversed([n for n in nodes if n.start_byte < node.start_byte]):
        if not _PRELUDE.search(candidate.type) or not _touches(candidate, first):
            break
        first = candidate
    return first


def _touches(upper: Node, lower: Node) -> bool:
    return lower.start_point[0] - upper.end_point[0] <= 1


def _name_of(node: Node) -> str:
    name = node.child_by_field_name("name") or node.child_by_field_name("type")
    return name.text.decode("utf-8", "replace") if name is not None and name.text else ""


def _statements(node: Node, raw: bytes, *, own: bool = False, until: int | None = None) -> list[int]:
    """Offsets of lines that begin with a statement (any named node); only large ones are looked into."""
    found: set[int] = set()
    stack = [(node, own)]
    while stack:
        current, counted = stack.pop()
        if until is not None and current.start_byte >= until:
            continue
        if counted:
            line = raw.rfind(b"\n", 0, current.start_byte) + 1
            if not raw[line : current.start_byte].strip():
                found.add(line)
        if current.end_byte - current.start_byte > _BIG or not counted:
            stack.extend((child, True) for child in _inner(current))
    return sorted(found)


def _inner(node: Node) -> list[Node]:
    body = node.child_by_field_name("body")
    return body.named_children if body is not None else node.named_children
