"""Numbers that Word computes and does not store: "3.2.1", "(a)", "第十条", from styles and numbering.xml.

After ECMA-376 part 1, 17.9: a `num` points to an `abstractNum`, whose levels count, and may override its levels. Lists of
one abstractNum share their counters; a `startOverride` begins anew, once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_LEVELS = 9
_PLACE = re.compile(r"%([1-9])")
_BULLET = "-"


@dataclass(frozen=True)
class Level:
    """One level of a list: where it starts, how a number looks, and what stands around it."""

    start: int = 1
    form: str = "decimal"
    text: str = ""
    legal: bool = False  # all numbers in it are decimal
    restart: int | None = None  # the level (from 1) after which it begins anew; 0: never
    style: str | None = None


@dataclass(frozen=True)
class _List:
    abstract: str
    levels: Mapping[int, Level]
    starts: Mapping[int, int]  # overridden, by level


@dataclass
class Numbering:
    """The lists of a document and their counters. Paragraphs must come in order."""

    lists: Mapping[str, _List]
    _counts: dict[str, list[int | None]] = field(default_factory=dict)
    _begun: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def of(cls, root: Any | None) -> Numbering:
        """From the root of numbering.xml, None where a document has no such part."""
        if root is None:
            return cls({})
        abstracts = {value(a, "@abstractNumId"): a for a in root.findall(f"{W}abstractNum")}
        links = {value(a, "styleLink"): a for a in abstracts.values() if a.find(f"{W}styleLink") is not None}
        lists: dict[str, _List] = {}
        for num in root.findall(f"{W}num"):
            identity = value(num, "abstractNumId") or ""
            abstract = abstracts.get(identity)
            linked = value(abstract, "numStyleLink") if abstract is not None else None
            abstract = links.get(linked, abstract) if linked else abstract
            if abstract is None:
                continue
            levels, starts = _levels(abstract), {}
            for override in num.findall(f"{W}lvlOverride"):
                depth = number(override, "@ilvl", 0)
                if (start := number_in(override, "startOverride")) is not None:
                    starts[depth] = start
                levels |= _levels(override)
            lists[value(num, "@numId") or ""] = _List(value(abstract, "@abstractNumId") or "", levels, starts)
        return cls(lists)

    def level_of_style(self, num: str, style: str) -> int | None:
        """The level that a list gives to paragraphs of a style."""
        found = self.lists.get(num)
        return next((d for d, level in found.levels.items() if level.style == style), None) if found else None

    def next(self, num: str, depth: int) -> str:
        """Count a paragraph of this list and level; what stands before its text, "" for nothing."""
        found = self.lists.get(num)
        level = found.levels.get(depth) if found else None
        if found is None or level is None:
            return ""
        counts = self._counts.setdefault(found.abstract, [None] * _LEVELS)
        before = counts[depth]
        if depth in found.starts and (num, depth) not in self._begun:
            self._begun.add((num, depth))
            counts[depth] = found.starts[depth]
        else:
            counts[depth] = level.start if before is None else before + 1
        for deeper in range(depth + 1, _LEVELS):
            restart = found.levels.get(deeper, Level()).restart
            if restart is None or depth < restart:
                counts[deeper] = None
        if level.form == "bullet":
            return _BULLET
        return _PLACE.sub(lambda place: _shown(found, counts, int(place[1]) - 1, level), level.text).strip()


def _levels(parent: Any) -> dict[int, Level]:
    found: dict[int, Level] = {}
    for element in parent.findall(f"{W}lvl"):
        depth = number(element, "@ilvl", 0)
        if 0 <= depth < _LEVELS:
            found[depth] = Level(
                start=number(element, "start", 1),
                form=value(element, "numFmt") or "decimal",
                text=value(element, "lvlText") or "",
                legal=is_on(element.find(f"{W}isLgl")),
                restart=number_in(element, "lvlRestart"),
                style=value(element, "pStyle"),
            )
    return found


def _shown(found: _List, counts: list[int | None], depth: int, asking: Level) -> str:
    level = found.levels.get(depth, Level())
    count = counts[depth]
    form = "decimal" if asking.legal and level.form not in {"bullet", "none"} else level.form
    return shown_number(level.start if count is None else count, form)


# --- reading values ---


def value(element: Any, name: str) -> str | None:
    """The `val` of the child of this name, or with "@" an attribute of the element itself; None if absent."""
    if name.startswith("@"):
        found = element.get(W + name[1:])
        return None if found is None else str(found)
    child = element.find(W + name)
    return value(child, "@val") if child is not None else None


def number_in(element: Any, name: str) -> int | None:
    """Like `value`, as a whole number."""
    text = value(element, name)
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,9}", text) else None


def number(element: Any, name: str, otherwise: int) -> int:
    """Like `number_in`, with a number for where there is none."""
    found = number_in(element, name)
    return otherwise if found is None else found


def is_on(element: Any | None) -> bool:
    """Whether a switch is there and not switched off."""
    return element is not None and (value(element, "@val") or "1") not in {"0", "false", "off"}


# --- forms of numbers ---

_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"),
          (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))  # fmt: skip
_DIGITS = "〇一二三四五六七八九"
_CHINESE = frozenset(
    "chineseCounting chineseCountingThousand taiwaneseCounting taiwaneseCountingThousand japaneseCounting "
    "ideographDigital japaneseDigitalTenThousand koreanDigital2".split()
)


def shown_number(count: int, form: str) -> str:
    """A number in one of the formats of ST_NumberFormat; decimal in those that are not known."""
    if form == "none":
        return ""
    if form in {"lowerLetter", "upperLetter"} and count > 0:
        text = chr(ord("a") + (count - 1) % 26) * min((count - 1) // 26 + 1, 32)
    elif form in {"lowerRoman", "upperRoman"} and 0 < count < 5000:
        text = _roman(count)
    elif form in _CHINESE and 0 < count < 10_000:
        return _chinese(count)
    elif form == "decimalZero":
        return f"{count:02d}"
    elif form == "ordinal":
        return f"{count}{_ordinal(count)}"
    else:
        return str(count)
    return text.upper() if form.startswith("upper") else text


def _roman(count: int) -> str:
    parts: list[str] = []
    for size, letters in _ROMAN:
        times, count = divmod(count, size)
        parts.append(letters * times)
    return "".join(parts)


def _chinese(count: int) -> str:
    text, zero = "", False
    for unit, sign in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = count // unit % 10
        if digit:
            text += ("零" if zero and text else "") + _DIGITS[digit] + sign
        zero = digit == 0
    return text.removeprefix("一") if 10 <= count < 20 else text


def _ordinal(count: int) -> str:
    return "th" if 10 < count % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
