"""A rule for markdown-it that finds what is plainly a heading, a paragraph or a list of points, many blocks at a time.

It takes only what cannot be anything else by the rules of CommonMark and of tables, whatever stands around it: lines
from the first column that begin like prose, down to a blank line. All the rest is left to the rules behind it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from markdown_it.rules_block import StateBlock

PLAIN = "plain"
# A line that begins like this starts no block but a paragraph, interrupts none, and is no underline.
_PROSE = r"(?:[^\W\d_]|[\[(!\"'“”‘’„«]|\d++(?![.)])|\*{1,2}[^\s*]|_{1,2}[^\s_]|`{1,2}[^`\n])[^\n]*+(?:\n|\Z)"
_HEADING = re.compile(r"(#{1,6})[ \t]+([^\s#|](?:[^\n#|]*[^\s#|])?)[ \t]*(?:\n|\Z)")
_PARAGRAPH = re.compile(rf"(?>(?:{_PROSE})+)(?=[ \t]*(?:\n|\Z))")
# Points of one sign, their further lines indented below; behind the blank lines nothing that could still belong to them.
_LIST = re.compile(
    rf"(?>(?=([-*+]))(?:\1 {_PROSE}(?:  {_PROSE})*)+)(?=[ \t]*(?:\n|\Z))(?=(?>(?:[ \t]*\n)*)(?:(?![-*+ \t])|[ \t]*\Z))"
)
_BLANK = re.compile(r"(?:[ \t]*\n)*")


class Plain(NamedTuple):
    """A block of the lines [first, last). `items`: the lines where a list's points begin, but for the first."""

    kind: str  # heading | paragraph | list
    first: int
    last: int
    level: int = 0
    title: str = ""
    items: tuple[int, ...] = ()


def plain_rule(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    """The blocks from line `first` on, for as long as they are plain, as one token."""
    if silent or state.level:
        return False
    found: list[Plain] = []
    text, line, at = state.src, first, state.bMarks[first]
    while at < len(text) and (block := _block_at(text, at, line)) is not None:
        plain, behind = block
        found.append(plain)
        at = _BLANK.match(text, behind).end()  # type: ignore[union-attr]
        line = plain.last + text.count("\n", behind, at)
    if not found:
        return False
    state.line = found[-1].last
    token = state.push(PLAIN, "", 0)
    token.map, token.meta = [first, state.line], {PLAIN: found}
    return True


def _block_at(text: str, at: int, line: int) -> tuple[Plain, int] | None:
    """The plain block that begins here, on that line, and the offset behind it."""
    if text[at] == "#":
        if (heading := _HEADING.match(text, at)) is None:
            return None
        return Plain("heading", line, line + 1, len(heading[1]), heading[2].strip()), heading.end()
    kind, match = "paragraph", _PARAGRAPH.match(text, at)
    if match is None:
        kind, match = "list", _LIST.match(text, at)
    if match is None:
        return None
    end = match.end()
    last = line + text.count("\n", at, end) + (text[end - 1] != "\n")
    if kind == "paragraph":
        return Plain(kind, line, last), end
    items = (number for number, each in enumerate(match[0].split("\n"), line) if each[:1] == match[1])
    return Plain(kind, line, last, items=tuple(items)[1:]), end
