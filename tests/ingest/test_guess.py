"""What a text is, whatever it is called: told by its content where that is unmistakable, and never at the cost of text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_tokens import PlainTokenizer, check_cover
from language_samples import SAMPLES

from bench.documents import generated
from ingest.chunker import cut
from ingest.detect import detect
from ingest.languages import language_of
from ingest.parsers import parse

MARKDOWN = "# Season tickets\n\nA ticket is **forty** euros, see [the list](list.md).\n\n## Refunds\n\n- none\n- ever\n"
FRONT = "---\ntitle: Tickets\ntags:\n  - price\n---\n\n# Season tickets\n\nForty euros.\n"
YAML = "# ports of the service\nname: web\nports:\n  - 80\n  - 443\nenv:\n  MODE: fast\n"
STREAM = "---\nkind: A\nspec:\n  n: 1\n---\nkind: B\n"
TOML = '# how it is built\n[project]\nname = "web"\n\n[tool.lint]\nlines = [100, 120]\n'
INI = "; settings\n[server]\nhost = example.org\nport=80\n\n[client]\nname: a b c\n"
CASES = {
    "markdown": (MARKDOWN, "markdown"), "front matter": (FRONT, "markdown"), "yaml": (YAML, "yaml"),
    "yaml stream": (STREAM, "yaml"),
    "toml": (TOML, "toml"), "ini": (INI, "ini"), "xml": ("<note><to>Ann</to></note>", "xml"), "json": ('{"a": [1, 2]}', "json"),
    "mail": ("From: a@example.org\nTo: b@example.org\nSubject: Tickets\n\nForty.\n", "email"),
    "html": ("<!doctype html><p>x</p>", "html"), "csv": ("".join(f"ann{n},{n},{2 * n}\n" for n in range(9)), "csv"),
}  # fmt: skip
PROSE = {
    "a memo": "Agenda:\n- tickets\n- refunds\n\nNote: bring the list. It is long.\nThanks, Ann\n",
    "a contract": "1. Term\n\n1.1 It is a year.\n\n# is how a number is written.\n\n2. Price\n\n2.1 Forty euros [see Annex].\n",
    "keys in prose": "Price: forty euros\nWe said so before, and it stands.\n",
    "a dialogue": "Ann: is it forty?\nBob: it is.\n",
    "a log": "[2026-01-01 10:00:00] started\n[2026-01-01 10:00:01] listening = true\nstopped by hand\n",
    "a quoted include": "We wrote #include <stdio.h> on the board, and package main below it.\nThen func was explained.\n",
    "settings of a build": "# where\n\nCC = gcc\n\n# how\n\n- all: x\n- clean: y\n",
    "notes with one mark": "# tickets\nforty euros\n",
    "comments of a script": "# a\nset -e\n\n# b\n\necho 1\n\n# c\n\necho 2\n\n# d\n\n# e\n- x\n",
}


@pytest.mark.parametrize("name", ["note", "note.txt", "note.unheard"])
@pytest.mark.parametrize("case", CASES)
def test_a_format_is_known_by_its_content_where_the_name_says_nothing(case: str, name: str) -> None:
    text, parser = CASES[case]
    if case == "csv" and name == "note.unheard":
        return  # a table without quotes is told from prose only where the name says at least that it is text
    assert detect(text.encode(), name) == parser
    assert detect(text.encode("utf-16"), name) == parser or case in {"xml", "json", "mail", "html"}
    assert parse(text.encode(), name) == parse(text.encode(), name)


@pytest.mark.parametrize("name", ["note", "note.md"])
def test_markdown_that_shows_programs_is_markdown(name: str) -> None:
    shown = f"# How to begin\n\nWrite:\n\n```\n{PROGRAMS['java']}\n{PROGRAMS['sql']}```\n"
    assert detect(shown.encode(), name) == "markdown"


@pytest.mark.parametrize("case", PROSE)
def test_prose_that_only_looks_like_a_format_stays_prose(case: str) -> None:
    assert detect(PROSE[case].encode(), "note.txt") == "text"
    assert parse(PROSE[case].encode(), "note").text == PROSE[case]


@pytest.mark.parametrize(
    ("data", "name", "parser"),
    [
        (b'{"a": 1}', "a.txt", "json"), (b'{"a": 1}', "a.md", "json"), (b'{"a": 1}', "a.yaml", "json"),
        (b"%PDF-1.7\n", "a.md", "pdf"),
        (b"<!doctype html><p>x", "a.txt", "html"), (b"<?xml version='1.0'?><a/>", "a.json", "xml"),
        (b"#!/bin/sh\necho\n", "run", "code"), (b"# Title\n\n## Part\n\ntext\n", "a.yaml", "yaml"),
        (YAML.encode(), "a.md", "markdown"), (b"a = 1\n", "a.ini", "ini"),
    ],
)  # fmt: skip
def test_a_content_that_is_one_thing_only_is_believed_before_the_name(data: bytes, name: str, parser: str) -> None:
    assert detect(data, name) == parser


PROGRAMS = {
    "php": "<?php\nfunction go($a) { return $a; }\n", "go": "package till\n\nimport \"fmt\"\n\nfunc Go() { fmt.Println() }\n",
    "java": "package shop;\n\nimport java.util.List;\n\npublic class Till {\n  int go() { return 1; }\n}\n",
    "csharp": "using System;\n\nnamespace Shop {\n  class Till { }\n}\n",
    "kotlin": "package shop\n\nimport a.b.C\n\nfun go(a: Int): Int = a\n",
    "rust": "use std::fmt;\n\npub fn go(a: u8) -> u8 {\n    a\n}\n",
    "c": "#include <stdio.h>\n\nint main(void) {\n  return 0;\n}\n",
    "cpp": "#include <vector>\n\nnamespace shop {\nstd::vector<int> go() { return {}; }\n}\n",
    "javascript": "const fs = require('fs');\n\nfunction go() {\n  return 1;\n}\n",
    "typescript": "import { a } from './a';\n\nexport interface Till {\n  go(): number;\n}\n",
    "python": "import os\n\n\ndef go(a):\n    return a\n",
    "ruby": "require 'json'\n\nclass Till\n  def go\n    1\n  end\nend\n",
    "sql": "CREATE TABLE till (\n  a INT\n);\n",
}  # fmt: skip


@pytest.mark.parametrize("name", ["program", "program.txt", "program.unheard"])
@pytest.mark.parametrize("language", PROGRAMS)
def test_a_program_without_a_telling_name_is_read_in_its_language(language: str, name: str) -> None:
    data = PROGRAMS[language].encode()
    assert (detect(data, name), language_of(data, name)) == ("code", language)
    assert any(block.kind == "definition" for block in parse(data, name).blocks)


@pytest.mark.parametrize("language", SAMPLES)
def test_no_program_is_taken_for_one_in_another_language_of_these(language: str) -> None:
    data = SAMPLES[language].text.encode()
    alike = {"tsx": {"typescript", "javascript"}, "typescript": {"javascript"}, "solidity": {"java"}, "groovy": {"java"}}
    assert language_of(data, "program") in {None, language, *alike.get(language, ())}


LINES = st.sampled_from(
    ["# Title", "## Part", "- item", "key: value", "  nested: 1", "[section]", "a = 1", 'b = "x"', "---", "```", "",
     "words of a text.",
     "#include <a>", "package a", "import b", "| a | b |", "|---|---|", "\ttabbed", "<?php", "}", "end"]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(LINES, min_size=1, max_size=14))
def test_whatever_is_guessed_no_character_is_lost(lines: list[str]) -> None:
    text = "\n".join([*lines, "last"])
    document = parse(text.encode(), "a")
    assert document.text == text
    check_cover(document, cut(document, PlainTokenizer(), max_tokens=24))


def test_the_benchmarks_prose_is_read_as_text_and_its_other_files_alike_without_their_names() -> None:
    for data, name in generated(0.01):
        parser = detect(data, name)
        if parser in {"text", "markdown", "toml", "ini", "json", "xml", "html", "email", "notebook"}:
            assert detect(data, "nameless") in {parser, "text"}
