"""Notebooks: code, Markdown and text output, in the order of the cells."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingest.parsers import parse
from ingest.parsers.notebook import MOST_OUTPUT
from storage.errors import FileError
from storage.types import Block, ParsedDocument


def notebook(*cells: dict[str, Any]) -> ParsedDocument:
    return parse(json.dumps({"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode(), "a.json")


def code(source: Any, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


def at(document: ParsedDocument, words: str) -> tuple[Block, str]:
    found = [b for b in document.blocks if words in document.text[b.start : b.end]]
    assert len(found) == 1, found
    return found[0], document.text[found[0].start : found[0].end]


def test_cells_are_blocks_under_the_headings_of_the_markdown_cells() -> None:
    document = notebook(
        code("import x"),
        {"cell_type": "markdown", "source": ["# Study\n", "\n", "About it.\n"]},
        {"cell_type": "markdown", "source": "## Load\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |"},
        code(["rows = load()\n", "rows.head()"], {"output_type": "stream", "text": ["one\n", "two\n"]}),
        {"cell_type": "raw", "source": "as it is"},
    )
    assert document.title == "Study"
    assert at(document, "import x")[0].headings == ()
    assert at(document, "About it.")[0].headings == ("Study",)
    table, _ = at(document, "| 1 | 2 |")
    assert (table.kind, table.header) == ("table", "| a | b |\n|---|---|")
    block, text = at(document, "load()")
    assert (block.kind, block.headings) == ("code", ("Study", "Load"))
    assert text == "rows = load()\nrows.head()\n\none\ntwo"
    assert [document.text[offset : offset + 4] for offset in block.breaks] == ["rows", "one\n", "two\n"]
    assert at(document, "as it is")[0].headings == ("Study", "Load")


def test_pictures_html_and_tracebacks_are_left_out_and_their_text_is_kept() -> None:
    picture = {"image/png": "iVBORw0KGgo" * 50, "text/html": "<table>secret</table>", "text/plain": ["<Figure 1>"]}
    error = {"output_type": "error", "ename": "KeyError", "evalue": "'x'", "traceback": ["\x1b[31mlong\x1b[0m"]}
    document = notebook(code("plot()", {"output_type": "display_data", "data": picture}, error))
    assert document.text == "plot()\n\n<Figure 1>\nKeyError: 'x'"


def test_colours_of_a_terminal_are_no_text() -> None:
    assert notebook(code("go()", {"text": "\x1b[1;31mred\x1b[0m"})).text == "go()\n\nred"


def test_long_output_is_cut_with_a_visible_mark() -> None:
    document = notebook(code("go()", {"text": "x" * (MOST_OUTPUT - 1)}, {"text": "y" * 500}))
    assert document.text.endswith("xxx\ny\n[… 499 more characters of output]")


@pytest.mark.parametrize("cell", [None, 3, {"cell_type": "code"}, {"source": {"a": 1}}, code(None, {"text": 5})])
def test_an_odd_cell_costs_nothing_but_itself(cell: Any) -> None:
    assert notebook(cell, code("kept = 1")).text == "kept = 1"


def test_a_notebook_without_text_says_so() -> None:
    with pytest.raises(FileError) as caught:
        notebook(code("\n"))
    assert caught.value.code == "no_text_extracted"
