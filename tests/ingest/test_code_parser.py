"""Source code by its definitions, whole or broken."""

from __future__ import annotations

import re
import sys

import pytest
from language_samples import SAMPLES

from ingest.languages import LANGUAGES, language_of
from ingest.parsers import parse, syntax
from storage.types import Block, ParsedDocument

PYTHON = '''"""Module."""
import os


# About first.
@cache
def first(a):
    return a


class Shop(Base):
    """A shop – with ümlauts."""

    rate = 2

    def sell(self, item):
        return item

    # Buys.
    @property
    def buy(self):
        return 1


LAST = first(1)
'''


def part(document: ParsedDocument, words: str) -> tuple[Block, str]:
    found = [b for b in document.blocks if words in document.text[b.start : b.end]]
    assert len(found) == 1, found
    return found[0], document.text[found[0].start : found[0].end]


def test_python_functions_and_methods_are_definitions() -> None:
    document = parse(PYTHON.encode(), "shop.py")
    assert document.text == PYTHON
    first, text = part(document, "def first")
    assert first.kind == "definition"
    assert text == "# About first.\n@cache\ndef first(a):\n    return a"
    sell, text = part(document, "def sell")
    assert (sell.header, sell.headings, sell.name) == ("class Shop(Base):\ndef sell(self, item):", ("Shop",), "sell")
    assert text == "    def sell(self, item):\n        return item"
    _, text = part(document, "def buy")
    assert text == "    # Buys.\n    @property\n    def buy(self):\n        return 1"
    head, text = part(document, "class Shop")
    assert text.endswith("rate = 2")
    assert (head.headings, head.name) == (("Shop",), "")
    assert part(document, "LAST")[0].kind == "code"
    assert part(document, "import os")[0].headings == ()


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_has_its_definitions_with_their_comments_and_class(language: str) -> None:
    sample = SAMPLES[language]
    assert language_of(sample.text.encode(), sample.file) == language
    document = parse(sample.text.encode(), sample.file)
    assert document.text == sample.text
    block, text = part(document, sample.words)
    assert block.kind == "definition"
    assert text.lstrip().startswith(sample.comment)
    above, _, own = block.header.rpartition("\n")
    assert (block.headings, above) == (sample.path, sample.header)
    assert own in " ".join(text.split())
    assert block.name in own
    assert re.fullmatch(r"[\w.]+", block.name) or language == "make"  # whose rules are called by their targets


def test_a_header_is_read_as_the_language_its_content_shows() -> None:
    for text, language in [
        ("class A {\n public:\n  int go() { return 1; }\n};\n", "cpp"),
        ("#import <x.h>\n@interface A\n@end\n", "objc"),
        ("int go(void);\n", "c"),
    ]:
        assert language_of(text.encode(), "a.h") == language


@pytest.mark.parametrize(
    ("line", "language"),
    [
        ("#!/usr/bin/env python3", "python"), ("#!/bin/sh -e", "bash"), ("#!/usr/bin/env -S deno run", "typescript"),
        ("#!/usr/local/bin/perl5.30", "perl"), ("#!/usr/bin/node", "javascript"), ("#!/opt/bin/unheard", None),
    ],
)  # fmt: skip
def test_a_script_without_a_suffix_is_known_by_its_interpreter(line: str, language: str | None) -> None:
    assert language_of(f"{line}\nx\n".encode(), "bin/tool") == language


def test_a_language_whose_grammar_is_not_installed_is_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_go", None)
    syntax.grammar_of.cache_clear()
    text = "package p\n\nfunc f() {\n\treturn\n}\n"
    document = parse(text.encode(), "a.go")
    syntax.grammar_of.cache_clear()
    assert document.text == text
    assert [block.kind for block in document.blocks] == ["code", "code"]
    assert [text[at:].split("\n")[0] for at in document.blocks[1].breaks] == ["\treturn", "}"]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    "broken", ["def f(:\n  x = (\n", "class {{{ é \n}} )) fn\n", "]" * 50 + "🙂 'unclosed\n", "("]
)
def test_a_file_with_syntax_errors_is_read_in_full(language: str, broken: str) -> None:
    sample = SAMPLES[language]
    document = parse((broken + sample.text + broken).encode(), sample.file)
    reached = 0
    for block in document.blocks:
        assert not document.text[reached : block.start].strip()
        assert block.start >= reached
        reached = block.end
    assert not document.text[reached:].strip()


def test_a_long_function_may_be_cut_at_statements_inside_a_loop() -> None:
    body = "".join(f"        total_{i} = compute(argument_{i}, other_{i})\n" for i in range(60))
    text = f"def f():\n    start = 1\n    for x in y:\n{body}    return start\n"
    document = parse(text.encode(), "a.py")
    (block,) = document.blocks
    lines = [document.text[at:].split("\n")[0] for at in block.breaks]
    assert "    for x in y:" in lines
    assert "        total_7 = compute(argument_7, other_7)" in lines
    assert "    return start" in lines


def test_five_thousand_nested_brackets_are_read() -> None:
    text = "x = " + "[" * 5000 + "]" * 5000
    for name in ("a.py", "a.js", "a.go"):
        assert parse(text.encode(), name).text == text


def test_a_minified_file_that_a_grammar_would_read_for_ever_is_read_by_lines() -> None:
    text = "function f(a){return a+1};var b=[1,2,{c:3}];" * 5000  # hours with the grammar of Scala
    document = parse(text.encode(), "a.scala")
    assert document.text == text
    assert [block.kind for block in document.blocks] == ["code"]
