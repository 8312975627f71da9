"""What is plain Markdown is found by a quick rule: the blocks are those that markdown-it finds without it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock

from ingest.parsers import markdown
from ingest.parsers.markdown import markdown_blocks
from ingest.parsers.markdown_plain import PLAIN, _QuickState
from ingest.parsers.outline import Outline
from storage.types import Block

PIECES = st.sampled_from(
    [
        "a", "B c", "é", " ", "  ", "\n", "\n\n", "\n\n", "\t", "\u00a0", "\u2028", "\x1c", "\x0b", "1", "23", "'s", ".",
        "(", "_", "/", "-", "中文", "🙂", "# ", "- ", "\n- ", "\n- a", "\n* b", "\n+ ", "> ", "```\n", "\n|", "|", "    ",
        "1. ", "\n2) ", "==\n", "\n---", "\n===", "<b>", "\n<div>", "\n<!--", "-->", "\\", "~~~", "\n\t- ", "\n  c",
        "\n## H", "#", "##", " #", "**", "__", "`", "[x]", "!", '"', "***", "\n   d", "\r", "\n:-", "|-", "\n  - e",
        "\n\n  f", "\n\n- g", "\n## H|\n-|-", "a | b\n--|--\n", "\n- a | b\n- -|-", "\n\nabc\ndef\n\n", "\n\n## T\n\n",
        "\n[a]: b", "\n    - h", "\n    i", "\n      - j", "\n ```\n", "````\n", "\n~~~~\n", "\n\n```x\ny\n```\n", "\n* \\[k",
    ]
)  # fmt: skip


def without_the_rule() -> MarkdownIt:
    reader = READER()
    reader.block.ruler.disable([PLAIN])
    return reader


READER = markdown._reader.__wrapped__


def both(text: str) -> tuple[list[Block], list[Block]]:
    with pytest.MonkeyPatch.context() as patch:
        quick = markdown_blocks(text, Outline())
        patch.setattr(markdown, "_reader", without_the_rule)
        return quick, markdown_blocks(text, Outline())


@settings(max_examples=1500, deadline=None)
@given(st.lists(PIECES, max_size=30).map("".join))
def test_blocks_are_those_of_markdown_it(text: str) -> None:
    quick, thorough = both(text)
    assert quick == thorough


@pytest.mark.parametrize(
    "text",
    [
        "Title\n===\n\ntext", "text\n---\n", "a | b\n--|--\nc | d", "## a|b\n-|-\n", "- a\n\n  more\n", "- a\n\n- b",
        "- a\n* b", "text\n# H", "text\n    code?", "2020 was\n2. two", "**bold** x\n*item* y", "***\n",
        "`code` x\n\n```\nfence\n\n# no\n```\n", "# \x1c a", "#\n\n# #", "- a\n  b\n- c\n\nend", "<div>\nx\n\ny",
        "text\n<div>", "[a]: b\n\n[c] d", "- a\n  - b\n\nend",
        "- a\n  - b\n    - c\n    d\n- e\n    * f\n\nend", "- a\n      - code?\n- b", "* \\[a] b\n* \\[c] d\n\n\\# no heading\n",
        "```\na\n```\nb\n", "~~~ `x\n```\n ~~~~ \nb",
        "````\n```\n\n````", "```\nopen\n\n- a", "``` `\nno\n```\n", "```\na\n    ```\n```b\n```",
        "text", "- a", "# a", "# a\n", "x\n \t\ny",
    ],
)
def test_shapes_that_are_nearly_plain(text: str) -> None:
    quick, thorough = both(text)
    assert quick == thorough


@settings(max_examples=400, deadline=None)
@given(st.text("ab \t\n\r\x0b\u3000", max_size=24))
def test_lines_are_marked_as_markdown_it_marks_them(text: str) -> None:
    marks = ("bMarks", "eMarks", "tShift", "sCount", "bsCount", "lineMax", "src")
    quick, own = (kind(text, READER(), {}, []) for kind in (_QuickState, StateBlock))
    assert [getattr(quick, name) for name in marks] == [getattr(own, name) for name in marks]


def test_a_fence_of_a_million_signs_is_read_as_markdown_it_reads_it() -> None:
    for run in ("`" * 1_000_000, "~" * 1_000_000):
        quick, thorough = both(f"{run}\na\n{run}\n\nend")
        assert quick == thorough


def test_plain_text_does_not_reach_the_slow_rules() -> None:
    text = "# Title\n\nA paragraph\nof two lines.\n\n"
    text += "- one\n  - deep\n- two\n  goes on\n\n```sh\nrun\n\nit\n```\n\nThe end (12.5 %).\n"
    (token,) = READER().parse(text)
    assert [(plain.kind, plain.first, plain.last) for plain in token.meta[PLAIN]] == [
        ("heading", 0, 1),
        ("paragraph", 2, 4),
        ("list", 5, 9),
        ("code", 10, 15),
        ("paragraph", 16, 17),
    ]
