"""Lines of prose to blocks: paragraphs at blank lines, numbered headings, and clauses on their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ingest.parsers.outline import CLAUSE_STARTS, STARTS, Mark, Outline, begins_clause, heading_mark
from storage.types import Block

_ITEM = re.compile(r"\s*(?:[-*+•·]|\(?\w{1,3}[.)])\s")
_RULE = re.compile(r"(=+|-+)\s*$")
_TITLE = 90  # characters of a heading that is no more than a line by itself, at most


@dataclass(frozen=True)
class Lines:
    """A text's lines without their ends, and the offset at which each starts (plus one past the last)."""

    lines: tuple[str, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> Lines:
        lines = tuple(text.split("\n"))
        return cls(lines, (0, *accumulate(map((1).__add__, map(len, lines)))))

    def end(self, last: int) -> int:
        """The offset just after the text of line `last`."""
        return self.starts[last] + len(self.lines[last])


def prose_blocks(source: Lines, first: int, last: int, outline: Outline, *, plain: bool) -> list[Block]:
    """Blocks of the lines [first, last). `plain`: underlined and capital lines are headings too."""
    lines = source.lines
    if last - first == 1 and not plain and lines[first].lstrip()[:1] not in STARTS:
        return [Block("paragraph", source.starts[first], source.end(first), outline.path)] if lines[first].strip() else []
    blocks: list[Block] = []
    begun = -1  # the first line of the paragraph being read
    index = first
    while index < last:
        line = lines[index]
        first_sign = line.lstrip()[:1]
        if not first_sign:
            begun = _close(source, blocks, begun, index, outline)
            index += 1
            continue
        if first_sign in STARTS or (plain and len(line) <= _TITLE):
            mark, height = _heading(lines, index, last, plain)
            if mark is not None:
                begun = _close(source, blocks, begun, index, outline)
                path = outline.enter(mark, line.strip())
                blocks.append(Block("heading", source.starts[index], source.end(index + height - 1), path))
                index += height
                continue
        if begun >= 0 and first_sign in CLAUSE_STARTS and begins_clause(lines, index) and not _ITEM.match(lines[begun]):
            begun = _close(source, blocks, begun, index, outline)
        begun = index if begun < 0 else begun
        index += 1
    _close(source, blocks, begun, last, outline)
    return blocks


def _close(source: Lines, blocks: list[Block], begun: int, until: int, outline: Outline) -> int:
    if begun >= 0:
        following = range(begun + 1, until)
        breaks = tuple([source.starts[i] for i in following if _ITEM.match(source.lines[i])]) if following else ()
        kind = "list" if breaks and _ITEM.match(source.lines[begun]) else "paragraph"
        blocks.append(Block(kind, source.starts[begun], source.end(until - 1), outline.path, "", breaks))
    return -1


def _heading(lines: Sequence[str], index: int, last: int, plain: bool) -> tuple[Mark | None, int]:
    """The heading that begins at this line, and its height in lines."""
    mark = heading_mark(lines, index)
    if mark is not None or not plain:
        return mark, 1
    line = lines[index]
    if len(line) > _TITLE or (index and lines[index - 1].strip()):
        return None, 1
    below = lines[index + 1] if index + 1 < last else ""
    rule = _RULE.match(below)
    if rule is not None and len(rule[1]) >= 3:
        return Mark("level", 1 if below[0] == "=" else 2), 2
    if not below.strip() and _is_capital_title(line.strip()) and _followed_by_prose(lines, index + 1, last):
        return Mark("level", 3), 1
    return None, 1


def _is_capital_title(line: str) -> bool:
    return (
        line.isupper() and sum(map(str.isalpha, line)) >= 4 and line[-1] not in ".,;!?:" and line[0].isalpha()
    )


def _followed_by_prose(lines: Sequence[str], index: int, last: int) -> bool:
    while index < last and not lines[index].strip():
        index += 1
    return index < last and not lines[index].isupper()
