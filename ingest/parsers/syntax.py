"""Syntax trees: grammars by language, parsing within bounds, and what a tree's nodes mean to an outline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from tree_sitter import Language, Node, Parser, Tree

from ingest.languages import LANGUAGES, CodeLanguage

_READ = 1024  # bytes handed to a grammar at a time
_READS = 20_000  # beside 16 for every 1,024 bytes: most files take two
_NAMES = frozenset("identifier simple_identifier name simple_name constant alias module_name class_name value_name".split())


def parsed(grammar: Language, raw: bytes) -> Tree | None:
    """The syntax tree; None where a grammar goes over the text again and again (seen with minified files).

    Counted in reads, not in seconds, so that a file is read the same way on a busy machine.
    """
    left = _READS + len(raw) // _READ * 16

    def read(offset: int, _point: object) -> bytes:
        nonlocal left
        left -= 1
        return raw[offset : offset + _READ] if left > 0 else b""

    tree = Parser(grammar).parse(read)
    return tree if left > 0 else None


@cache
def grammar_of(language: str) -> Language | None:
    """The grammar, or None where its wheel is not installed."""
    row = LANGUAGES[language]
    try:
        found: Callable[[], object] = getattr(import_module(row.module), row.function)
    except ImportError:
        return None
    with warnings.catch_warnings():  # some wheels still hand out the grammar's address as a number
        warnings.simplefilter("ignore", DeprecationWarning)
        return Language(found())


@dataclass(frozen=True)
class Syntax:
    """What a language's node types mean to an outline."""

    containers: frozenset[str]
    definitions: frozenset[str]  # containers too
    groups: frozenset[str]
    wrappers: frozenset[str]
    prelude: frozenset[str]
    calls: bool

    @classmethod
    def of(cls, row: CodeLanguage) -> Syntax:
        containers, definitions, groups, wrappers, prelude = (
            frozenset(words.split())
            for words in (row.containers, row.definitions, row.groups, row.wrappers, row.prelude)
        )
        return cls(containers, definitions | containers, groups, wrappers, prelude, row.calls)

    def kind(self, node: Node) -> str:
        """A node's type as the table names it; keywords have none."""
        if self.calls and node.type == "call":
            target = node.child_by_field_name("target")
            return text_of(target) if target is not None else ""
        return node.type if node.is_named else ""

    def is_prelude(self, node: Node) -> bool:
        return "comment" in node.type or node.type in self.prelude

    def members(self, node: Node) -> list[Node]:
        """What a container holds, whether or not its grammar wraps it in a body."""
        body = node.child_by_field_name("body")
        return self.flat(inner for child in node.children for inner in (child.children if child == body else [child]))

    def flat(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes, with a group's children in its place."""
        found: list[Node] = []
        stack = [*nodes][::-1]
        while stack:
            node = stack.pop()
            if node.is_named and node.type in self.groups:
                stack += node.children[::-1]
            else:
                found.append(node)
        return found

    def definition_in(self, node: Node) -> Node | None:
        """The definition a node is, or wraps (decorator, export, template, assignment)."""
        inner: Node | None = node
        for _ in range(5):
            if inner is None or (kind := self.kind(inner)) in self.definitions:
                break
            if kind not in self.wrappers:
                return None
            children = [child for child in inner.named_children if self.kind(child) in self.definitions]
            wrapped = (child for child in inner.named_children if child.type in self.wrappers)
            inner = children[-1] if children else next(wrapped, None)
        else:
            return None
        # "struct point p;" names a type and defines nothing.
        if inner is not None and inner.type.endswith("_specifier") and inner.child_by_field_name("body") is None:
            return None
        return inner

    def name_of(self, outer: Node, node: Node) -> Node | None:
        """The node that names a definition: a field of its own, else the first name in it or in what wraps it."""
        declared = node  # in C a name stands inside what it is declared to be: a function, or a pointer to what it gives
        while (inner := declared.child_by_field_name("declarator")) is not None:
            declared = inner
        direct = (child for child in node.named_children if child.type in _NAMES and not self.calls)
        own = node.child_by_field_name("name") or (declared if declared != node else next(direct, None))
        if (own := own or node.child_by_field_name("type")) is not None:
            return own
        stack = [(child, 0) for child in reversed(outer.named_children[1 if self.calls else 0 :])]
        while stack:
            found, depth = stack.pop()
            if found.type in _NAMES:
                return found
            if depth < 2:
                stack += [(child, depth + 1) for child in reversed(found.named_children)]
        return None


def text_of(node: Node) -> str:
    return node.text.decode("utf-8", "replace") if node.text else ""
