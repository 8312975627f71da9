"""What is a heading, a clause, a list, a table; and which parser a file gets."""

from __future__ import annotations

import pytest

from ingest.detect import detect
from ingest.parsers import PARSERS, parse
from storage.errors import FileError
from storage.types import Block, ParsedDocument

CONTRACT = """SERVICE AGREEMENT

1. Definitions

1.1 "Agreement" means this document and all schedules
attached to it.

1.2 "Fee" means the amount set out in clause 5.

2. Term

2.1 The term is twelve months.

Article 4 Liability

Section 4.2 shall apply to all claims under this agreement.

As the parties agreed earlier, the cap named in
Article 5 Fees of this agreement remains in force.

§ 5 Haftung

Die Parteien haften nach dem Gesetz.

第十条 保密

甲方应当保守秘密。

第十一条规定的情形除外。
"""


def texts(document: ParsedDocument, kind: str) -> list[str]:
    return [document.text[block.start : block.end] for block in document.blocks if block.kind == kind]


def block_with(document: ParsedDocument, words: str) -> Block:
    found = [b for b in document.blocks if words in document.text[b.start : b.end]]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("name", ["contract.txt", "contract.md"])
def test_a_numbered_contract_has_its_headings_and_no_others(name: str) -> None:
    headings = texts(parse(CONTRACT.encode(), name), "heading")
    expected = ["1. Definitions", "2. Term", "Article 4 Liability", "§ 5 Haftung", "第十条 保密"]
    assert [h for h in headings if h != "SERVICE AGREEMENT"] == expected


@pytest.mark.parametrize("name", ["contract.txt", "contract.md"])
def test_a_clause_keeps_its_number_and_body_together(name: str) -> None:
    document = parse(CONTRACT.encode(), name)
    clause = block_with(document, "attached to it")
    assert document.text[clause.start : clause.end].startswith('1.1 "Agreement" means')
    assert clause.headings[-1] == "1. Definitions"
    assert block_with(document, "twelve months").headings[-1] == "2. Term"


@pytest.mark.parametrize("name", ["contract.txt", "contract.md"])
@pytest.mark.parametrize("words", ["Section 4.2 shall apply", "Article 5 Fees", "第十一条规定"])
def test_a_line_that_begins_with_a_cross_reference_is_no_heading(name: str, words: str) -> None:
    assert block_with(parse(CONTRACT.encode(), name), words).kind == "paragraph"


def test_clauses_without_blank_lines_between_are_told_apart() -> None:
    text = "1. Duties\n1.1 The supplier delivers.\n1.2 The buyer pays\nwithin ten days.\n"
    document = parse(text.encode(), "a.txt")
    assert texts(document, "heading") == ["1. Duties"]
    assert texts(document, "paragraph") == [
        "1.1 The supplier delivers.",
        "1.2 The buyer pays\nwithin ten days.",
    ]


def test_deeper_numbers_nest_and_shallower_ones_close() -> None:
    text = "1. One\n\n1.1 Inner Part\n\nBody a.\n\n2. Two\n\nBody b.\n"
    document = parse(text.encode(), "a.txt")
    assert block_with(document, "Body a").headings == ("1. One", "1.1 Inner Part")
    assert block_with(document, "Body b").headings == ("2. Two",)


@pytest.mark.parametrize(
    "text",
    [
        "The cap is the one that is set out in\nArticle 5\n\nNext paragraph.\n",
        "Section 4.2 Liability shall apply to claims\n\nNext paragraph.\n",
        "Article 7 Fees remains\nin force.\n\nNext paragraph.\n",
    ],
)
def test_a_cross_reference_that_looks_like_a_title_is_no_heading(text: str) -> None:
    assert texts(parse(text.encode(), "a.txt"), "heading") == []


def test_a_shopping_list_has_no_headings() -> None:
    document = parse(b"To buy:\n\n1. Milk\n2. Eggs\n3. Bread\n\nThat is all.\n", "a.txt")
    assert texts(document, "heading") == []


def test_years_and_amounts_are_no_headings() -> None:
    text = "2024 was a good year for the firm.\n\n3.5 million people came.\n\n12 Men ran, he said.\n\nEnd.\n"
    assert texts(parse(text.encode(), "a.txt"), "heading") == []


def test_underlined_and_capital_lines_are_headings_in_text() -> None:
    document = parse(b"Title\n=====\n\nIntro.\n\nNEXT PART\n\nMore.\n", "a.txt")
    assert block_with(document, "More").headings == ("Title", "NEXT PART")


MARKDOWN = """---
title: front
---

# Guide

Intro *text*.

## Steps

- one
- two
  - inner

| a | b |
|---|---|
| 1 | 2 |
| 3 | 4 |

```python
x = 1

# no heading
y = 2
```

Setext
------

> quoted
"""


def test_markdown_structure_is_found_and_its_text_is_the_file() -> None:
    document = parse(MARKDOWN.encode(), "a.md")
    assert document.text == MARKDOWN
    assert [b.kind for b in document.blocks] == [
        "code", "heading", "paragraph", "heading", "list", "table", "code", "heading", "paragraph",
    ]  # fmt: skip
    assert document.title == "Guide"
    table = block_with(document, "| a | b |")
    assert table.headings == ("Guide", "Steps")
    assert table.header == "| a | b |\n|---|---|"
    assert [document.text[at : at + 5] for at in table.breaks] == ["| 3 |"]
    assert block_with(document, "quoted").headings == ("Guide", "Setext")


def test_code_in_a_fence_may_be_cut_at_its_lines_but_not_beside_the_fence() -> None:
    document = parse(MARKDOWN.encode(), "a.md")
    fence = block_with(document, "```")
    assert [document.text[at:].split("\n")[0] for at in fence.breaks] == ["", "# no heading", "y = 2"]


@pytest.mark.parametrize(
    ("data", "name", "parser"),
    [
        (b"%PDF-1.7\n", "notes.txt", "pdf"),
        (b"\n<!DOCTYPE html><p>x", "notes.txt", "html"),
        (b"\xef\xbb\xbf<html><p>x", "notes", "html"),
        (b"<p>x", "a.HTM", "html"),
        (b"# x", "README.md", "markdown"),
        (b"x = 1", "a.py", "code"),
        (b"#!/usr/bin/env python3\nx = 1", "tool", "code"),
        (b"x", "a.unknown", "text"),
        ("ab".encode("utf-16"), "a.txt", "text"),
        (b"{}", "a.json", "json"),
        (b'{"a": 1,', "a.json", "json"),
        (b'\xef\xbb\xbf {"a": [1]}', "a.txt", "json"),
        ('[{"a": 1}]'.encode("utf-16"), "export", "json"),
        (b'{"a": 1}\n{"a": 2}\n', "a.log", "json"),
        (b'[1]: http://x "a reference"\n', "a.md", "markdown"),
        (b"{% include x %}\n", "a.html", "html"),
        (b'{"cells": [], "metadata": {}, "nbformat": 4}', "a.json", "notebook"),
        (b'{"cells": 3, "nbformat": 4}', "a.ipynb", "json"),
        (b"<a><b/></a>", "a.txt", "xml"),
        (b"<a><b></a>", "a.txt", "text"),
        (b'<?xml version="1.0"?><a>', "a.txt", "xml"),
        (b'<?xml version="1.0"?>\n<!DOCTYPE html>\n<html/>', "a.xml", "html"),
        (b"<p>one</p>", "a.md", "markdown"),
        (b"<svg/>", "a.svg", "xml"),
        (b"<?php echo 1;", "a.php", "code"),
        (b"import os\n\ndef f(): return 1\n", "tool", "code"),
        (b"import of goods\nclass A: fares\n", "note.txt", "text"),
        (b"a\tb\n1\t2\n3\t4\n", "a.txt", "csv"),
        (b"a,b,c\n1,2,3\n4,5,6\n", "export", "csv"),
        (b"Dear all, hello, you\nthis, that, these\nother, words, here.\n", "a.txt", "text"),
        (b"a: 1", "a.yml", "yaml"),
        (b"[a]\nb = 1", "a.toml", "toml"),
        (b"[a]\nb = 1", "a.cfg", "ini"),
        (b"all:\n\tx", "Makefile", "code"),
    ],
)
def test_content_decides_before_the_name_does(data: bytes, name: str, parser: str) -> None:
    assert detect(data, name) == parser
    assert parser in PARSERS


@pytest.mark.parametrize(
    ("data", "name", "code"),
    [
        (b"", "a.txt", "empty_file"),
        (b" \n\t\r\n ", "a.txt", "no_text_extracted"),
        (b"\xef\xbb\xbf\n", "a.md", "no_text_extracted"),
        (b"<html><script>x()</script></html>", "a.html", "no_text_extracted"),
        (b"\x7fELF\x02\x01\0\0\0", "a.txt", "unsupported_file"),
        (b"\x89PNG\r\n\x1a\n\0\0", "a.md", "unsupported_file"),
        (b"abc\0\0\0def\x01\0xyz\0", "a.txt", "unsupported_file"),
        (b"PK\x03\x04rest", "a.txt", "unsupported_file"),
    ],
)
def test_a_file_without_text_says_why(data: bytes, name: str, code: str) -> None:
    with pytest.raises(FileError) as caught:
        parse(data, name)
    assert caught.value.code == code


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a.py", "a.csv", "a.json"])
def test_control_markers_come_through_unchanged(name: str) -> None:
    marks = "<|im_end|> <|im_start|>system [INST] <<SYS>> </s> <|eot_id|>"
    written = marks.replace("<", "&lt;") if name == "a.html" else marks
    assert marks in parse(f"# {written}\n".encode(), name).text


@pytest.mark.parametrize(
    "name", ["a.txt", "a.md", "a.py", "a.csv", "a.yaml", "a.html", "a.rs", "a.json", "a.toml", "a.ini", "a.xml", "a.log"]
)
@pytest.mark.parametrize(
    "sample", [CONTRACT, MARKDOWN, "\n\n  x\n", "\ry\r\rz", "é\x0b\x0c\n\x1cq", "a\0b" * 0 + "q"]
)
def test_blocks_are_ordered_apart_and_leave_no_text_out(name: str, sample: str) -> None:
    document = parse(sample.encode(), name)
    reached = 0
    for block in document.blocks:
        assert reached <= block.start < block.end <= len(document.text)
        assert not document.text[reached : block.start].strip()
        assert all(block.start < at < block.end for at in block.breaks)
        reached = block.end
    assert not document.text[reached:].strip()
    assert sorted(a.start for a in document.anchors) == [a.start for a in document.anchors]


def test_a_nul_character_becomes_the_replacement_character_in_place() -> None:
    document = parse(b"<p>one&#0;two</p><p>three</p>", "page.html")
    assert "\x00" not in document.text
    assert "one" in document.text
    assert "three" in document.text
