"""One PDF page as PDFium reads it: words with their boxes, in the order of the file, and the lines drawn on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from pypdfium2 import raw

# PDFium writes one of these for a hyphen that only breaks a word at a line's end.
_HYPHEN = "\x02\ufffe"
_WORD = re.compile(rf"[^\s{_HYPHEN}]+")
_MOST_PATHS = 4000  # a page with more of them is a drawing
_MOST_SEGMENTS = 64  # of a path; one with more is a shape
_SHORTEST = 4.0  # points
_PATH, _LINE_TO, _MOVE_TO = 2, 0, 2  # FPDF_PAGEOBJ_PATH, FPDF_SEGMENT_LINETO, FPDF_SEGMENT_MOVETO


@dataclass(frozen=True, slots=True)
class Word:
    """A word and its box in points, y upwards, as the page is shown: its rotation is undone."""

    text: str
    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True, slots=True)
class Run:
    """Words that follow one another on a line. `text` has the blanks between them as the file has them.

    `order`: its place in the file; `size`: of its first letter; `hyphen`: it ends in one that only breaks a word;
    `rows`: the cells of a table that stands in this place.
    """

    text: str
    words: tuple[Word, ...]
    order: int
    size: float
    hyphen: bool = False
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def x0(self) -> float:
        return min(word.x0 for word in self.words)

    @property
    def x1(self) -> float:
        return max(word.x1 for word in self.words)

    @property
    def y0(self) -> float:
        return min(word.y0 for word in self.words)

    @property
    def y1(self) -> float:
        return max(word.y1 for word in self.words)

    @property
    def middle(self) -> float:
        """Of its first word, so that what stands higher or lower in a line does not move it."""
        return (self.words[0].y0 + self.words[0].y1) / 2

    @property
    def height(self) -> float:
        return self.words[0].y1 - self.words[0].y0

    def part(self, first: int, last: int) -> Run:
        """The words [first, last) on their own."""
        if last - first == len(self.words):
            return self
        some = self.words[first:last]
        text = " ".join(word.text for word in some)
        if last == len(self.words):
            return replace(self, text=text, words=some)
        breaks = text[-1] == "-" and text[-2:-1].isalpha()  # PDFium's rule for a line's end, which this is now
        return replace(self, text=text[:-1] if breaks else text, words=some, hyphen=breaks)


@dataclass(frozen=True, slots=True)
class Rule:
    """A line drawn along an axis: at `at` on the other one, from `start` to `end`."""

    at: float
    start: float
    end: float


@dataclass
class Page:
    """What a page holds. `level`: its lines are level as shown, so that boxes tell where they stand."""

    runs: list[Run] = field(default_factory=list)
    across: list[Rule] = field(default_factory=list)
    down: list[Rule] = field(default_factory=list)
    has_marks: bool = False  # pictures or drawings
    damaged: bool = False
    level: bool = True


class _Turn:
    """From the page's own coordinates to those as it is shown, clockwise by `rotation` quarters."""

    def __init__(self, page: Any) -> None:
        self.quarters = raw.FPDFPage_GetRotation(page.raw)

    def box(self, left: float, bottom: float, right: float, top: float) -> tuple[float, float, float, float]:
        if not self.quarters:
            return left, bottom, right, top
        a, b = self.point(left, bottom), self.point(right, top)
        return min(a[0], b[0]), min(a[1], b[1]), max(a[0], b[0]), max(a[1], b[1])

    def point(self, x: float, y: float) -> tuple[float, float]:
        return ((x, y), (y, -x), (-x, -y), (-y, x))[self.quarters]


def read_page(page: Any) -> Page:
    """The page's words and lines. `page`: pypdfium2's."""
    result = Page()
    turn = _Turn(page)
    text_page = page.get_textpage()
    text = text_page.get_text_range(errors="replace")
    result.runs = list(_runs(text, _words(text_page, text, turn), text_page))
    text_page.close()
    result.has_marks = bool(result.runs) or raw.FPDFPage_CountObjects(page.raw) > 0
    if result.runs:
        result.level = _is_level(result.runs)
        _read_rules(page, turn, result)
    return result


def _words(text_page: Any, text: str, turn: _Turn) -> Iterator[tuple[int, int, int, Word]]:
    """Words with their place in the text, [start, end), and the number of their first letter in PDFium."""
    rect = raw.FS_RECTF()
    handle, loose = text_page.raw, raw.FPDFText_GetLooseCharBox
    # PDFium counts letters beyond U+FFFF twice, and letters it gives no text for; mostly there are none of either.
    same = text_page.count_chars() == len(text)
    units = None if same or text.isascii() else _units(text)
    for match in _WORD.finditer(text):
        start, end = match.span()
        first, last = start, end - 1
        if not same:
            first, last = (units[first], units[last]) if units else (first, last)
            first = raw.FPDFText_GetCharIndexFromTextIndex(handle, first)
            last = raw.FPDFText_GetCharIndexFromTextIndex(handle, last)
        loose(handle, first, rect)
        a = turn.box(rect.left, rect.bottom, rect.right, rect.top)
        if last != first:
            loose(handle, last, rect)
            b = turn.box(rect.left, rect.bottom, rect.right, rect.top)
            a = min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])  # some scripts run to the left
        yield start, end, first, Word(match[0], *a)


def _units(text: str) -> list[int]:
    """Where each character begins in UTF-16."""
    found, at = [], 0
    for character in text:
        found.append(at)
        at += 1 + (character > "\uffff")
    return found


def _runs(text: str, words: Iterator[tuple[int, int, int, Word]], text_page: Any) -> Iterator[Run]:
    begun, reached, number = 0, 0, 0
    run: list[Word] = []

    def ended(hyphen: bool) -> Run:
        size = float(raw.FPDFText_GetFontSize(text_page.raw, number)) if number >= 0 else 0.0
        return Run(clean(text[begun:reached]), tuple(run), order, size, hyphen)

    order = 0
    for start, end, first, word in words:
        between = text[reached:start]
        hyphen = not set(_HYPHEN).isdisjoint(between)
        if run and (hyphen or "\n" in between or _is_elsewhere(run[-1], word)):
            yield ended(hyphen)
            order += 1
            run = []
        if not run:
            begun, number = start, first
        run.append(word)
        reached = end
    if run:
        yield ended(not set(_HYPHEN).isdisjoint(text[reached:]))


def _is_elsewhere(before: Word, word: Word) -> bool:
    """Whether a word that PDFium puts on the line of the one before stands on another one."""
    height = max(before.y1 - before.y0, word.y1 - word.y0)
    return abs(before.y0 + before.y1 - word.y0 - word.y1) > 2 * height


def clean(line: str) -> str:
    """A line without what does not show."""
    kept = line.replace("\xad", "").strip()
    return kept if kept.isprintable() else "".join(c if c >= " " else " " for c in kept).strip()


def _is_level(runs: list[Run]) -> bool:
    long = [word for run in runs for word in run.words if len(word.text) >= 4]
    upright = sum(word.y1 - word.y0 > word.x1 - word.x0 for word in long)
    return upright <= len(long) // 5


# --- drawn lines ---


def _read_rules(page: Any, turn: _Turn, result: Page) -> None:
    matrix = raw.FS_MATRIX()
    paths = 0
    for index in range(raw.FPDFPage_CountObjects(page.raw)):
        shape = raw.FPDFPage_GetObject(page.raw, index)
        if raw.FPDFPageObj_GetType(shape) != _PATH:
            continue
        paths += 1
        if paths > _MOST_PATHS:
            result.across, result.down = [], []
            return
        segments = raw.FPDFPath_CountSegments(shape)
        if 0 < segments <= _MOST_SEGMENTS and raw.FPDFPageObj_GetMatrix(shape, matrix) and _is_seen(shape):
            corners = [(matrix.a * x + matrix.c * y + matrix.e, matrix.b * x + matrix.d * y + matrix.f, move)
                       for x, y, move in _corners(shape, segments)]  # fmt: skip
            _add_edges([(*turn.point(x, y), move) for x, y, move in corners], result)


def _is_seen(shape: Any) -> bool:
    """Whether a path is stroked, or filled and thin enough to be a line."""
    fill, stroke = raw.c_int(), raw.c_int()
    raw.FPDFPath_GetDrawMode(shape, fill, stroke)
    if stroke.value or not fill.value:
        return bool(stroke.value)
    box = [raw.c_float() for _ in range(4)]
    raw.FPDFPageObj_GetBounds(shape, *box)
    left, bottom, right, top = (side.value for side in box)
    return bool(min(right - left, top - bottom) < 3)


def _corners(shape: Any, segments: int) -> Iterator[tuple[float, float, bool]]:
    """A path's points, and whether the pen was lifted before each; a curve's points are as good as lifted."""
    x, y = raw.c_float(), raw.c_float()
    begun = (0.0, 0.0)
    for index in range(segments):
        segment = raw.FPDFPath_GetPathSegment(shape, index)
        raw.FPDFPathSegment_GetPoint(segment, x, y)
        kind = raw.FPDFPathSegment_GetType(segment)
        if kind == _MOVE_TO:
            begun = (x.value, y.value)
        yield x.value, y.value, kind != _LINE_TO
        if raw.FPDFPathSegment_GetClose(segment):
            yield *begun, False


def _add_edges(corners: list[tuple[float, float, bool]], result: Page) -> None:
    for (x0, y0, _), (x1, y1, lifted) in pairwise(corners):
        if lifted:
            continue
        if abs(y1 - y0) < 1 and abs(x1 - x0) >= _SHORTEST:
            result.across.append(Rule((y0 + y1) / 2, min(x0, x1), max(x0, x1)))
        elif abs(x1 - x0) < 1 and abs(y1 - y0) >= _SHORTEST:
            result.down.append(Rule((x0 + x1) / 2, min(y0, y1), max(y0, y1)))
