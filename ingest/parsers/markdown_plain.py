"""A rule for markdown-it that finds what is plainly a heading, a paragraph, a list of points or fenced code, many blocks at a
time.

It takes only what cannot be anything else by the rules of CommonMark and of tables, whatever stands around it: lines
from the first column that begin like prose, down to a blank line, and fences that are closed. All the rest is left to the
rules behind it.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.parser_block import ParserBlock
from markdown_it.rules_block import StateBlock
from markdown_it.token import Token
from markdown_it.utils import EnvType

PLAIN = "plain"
_INDENTS = frozenset(" \t")
_BLANKS = frozenset(" \t\n")
_FENCES = frozenset("`~")
# A line that begins like this starts no block but a paragraph, interrupts none, and is no underline.
_PROSE = r"(?:[^\W\d_]|[\\\[(!\"'“”‘’„«]|\d++(?![.)])|\*{1,2}[^\s*]|_{1,2}[^\s_]|`{1,2}[^`\n])[^\n]*+(?:\n|\Z)"
_HEADING = re.compile(r"(#{1,6})[ \t]+([^\s#|](?:[^\n#|]*[^\s#|])?)[ \t]*(?:\n|\Z)")
_PARAGRAPH = re.compile(rf"(?>(?:{_PROSE})+)(?=[ \t]*(?:\n|\Z))")
# Points of one sign, below them their further lines and points of their own, indented by two or four: whatever stands between,
# this is never so much that it would be code. Behind the blank lines nothing that could still belong to them.
_LIST = re.compile(
    rf"(?>(?=([-*+]))(?:\1 {_PROSE}(?:  (?:  )?(?:[-*+] )?{_PROSE})*)+)(?=[ \t]*(?:\n|\Z))"
    r"(?=(?>(?:[ \t]*\n)*)(?:(?![-*+ \t])|[ \t]*\Z))"
)
_POINTS = ("- ", "* ", "+ ")
_FENCE = re.compile(r"(?:(`{3,})[^`\n]*|(~{3,})(?!~)[^\n]*)\n")
_BLANK = re.compile(r"(?:[ \t]*\n)*")


class Plain(NamedTuple):
    """A block of the lines [first, last). `items`: the lines where it may be cut: points but for the first, lines of code."""

    kind: str  # heading | paragraph | list | code
    first: int
    last: int
    level: int = 0
    title: str = ""
    items: tuple[int, ...] = ()


class QuickBlocks(ParserBlock):
    """markdown-it's reader of blocks, which looks at the signs of those lines alone that are indented."""

    def parse(self, src: str, md: MarkdownIt, env: EnvType, outTokens: list[Token]) -> list[Token] | None:
        if not src:
            return None
        state = _QuickState(src, md, env, outTokens)
        self.tokenize(state, state.line, state.lineMax)
        return state.tokens


class _QuickState(StateBlock):
    """As `StateBlock` is made, but for the time that it takes."""

    def __init__(self, src: str, md: MarkdownIt, env: EnvType, tokens: list[Token]) -> None:
        super().__init__("", md, env, tokens)
        lines = src.split("\n")
        if not lines[-1].strip(" \t"):
            lines.pop()  # a last line of blanks alone is none
        self.src, self.lineMax = src, len(lines)
        ends = list(accumulate(map((1).__add__, map(len, lines))))
        self.bMarks = [0, *ends[:-1], len(src)] if lines else [len(src)]
        self.eMarks = [*(end - 1 for end in ends), len(src)]
        self.tShift, self.sCount, self.bsCount = ([0] * (len(lines) + 1) for _ in range(3))
        for number, line in enumerate(lines):
            if line[:1] in _INDENTS:
                indent = line[: len(line) - len(line.lstrip(" \t"))]
                self.tShift[number], self.sCount[number] = len(indent), len(indent.expandtabs(4))


def plain_rule(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    """The blocks from line `first` on, for as long as they are plain, as one token."""
    if silent or state.level:
        return False
    found: list[Plain] = []
    text, line, at = state.src, first, state.bMarks[first]
    while at < len(text) and (block := _block_at(text, at, line)) is not None:
        plain, behind = block
        found.append(plain)
        at, line = behind, plain.last
        if text[at : at + 1] in _BLANKS:
            at = _BLANK.match(text, behind).end()  # type: ignore[union-attr]
            line += text.count("\n", behind, at)
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
    if text[at] in _FENCES and (fence := _FENCE.match(text, at)) is not None:
        return _fenced(text, at, line, fence)
    kind, match = "paragraph", _PARAGRAPH.match(text, at)
    if match is None:
        kind, match = "list", _LIST.match(text, at)
    if match is None:
        return None
    end, last = match.end(), _behind(text, at, line, match.end())
    if kind == "paragraph":
        return Plain(kind, line, last), end
    items = (number for number, each in enumerate(match[0].split("\n"), line) if each.lstrip(" ").startswith(_POINTS))
    return Plain(kind, line, last, items=tuple(items)[1:]), end


def _fenced(text: str, at: int, line: int, fence: re.Match[str]) -> tuple[Plain, int] | None:
    """The code behind this opening, if it is closed."""
    run = fence[1] or fence[2]
    closing = re.compile(rf"^ {{0,3}}{run[0]}{{{len(run)},}}[ \t]*(?:\n|\Z)", re.MULTILINE).search(text, fence.end())
    if closing is None:
        return None
    last = _behind(text, at, line, closing.end())
    return Plain("code", line, last, items=tuple(range(line + 2, last - 1))), closing.end()


def _behind(text: str, at: int, line: int, end: int) -> int:
    """The line behind a block from this line that reaches from `at` to `end`."""
    return line + text.count("\n", at, end) + (text[end - 1] != "\n")
