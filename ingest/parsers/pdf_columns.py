"""The reading order of a PDF page: what spans its columns first, then column by column.

Space between columns is looked for as in the XY cut (Nagy and Seth 1984): a strip that hardly any line crosses. It counts
only where both sides read like prose, in full lines of some width; else the order of the file stands, as most writers of PDF
keep the reader's order themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from ingest.parsers.pdf_page import Run, Word

_DEEPEST = 3  # columns within columns
_GAP = 0.7  # of a line's height: narrower gaps are between words
_WIDTH = 7.0  # of a line's height: the narrowest column
_LINES = 4  # of a column
_LETTERS = 14  # of a column's line, on average
_FULL, _OF_LINES = 0.75, 0.45  # so much of the width is a full line, and so many of the lines are full
_TRIED = 4  # strips
_LARGE = 1.15  # a heading's letters against the others'

Row = list[Run]


def reading_order(runs: Sequence[Run], *, right_to_left: bool = False) -> list[list[Run]]:
    """The runs in order, region by region; one that spans a gap between columns is in two parts."""
    return _regions(list(runs), right_to_left, 0)


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """The runs by line, from the top; those of a line from left to right."""
    rows: list[Row] = []
    for run in sorted(runs, key=lambda run: -run.middle):
        if rows and rows[-1][0].middle - run.middle < 0.5 * min(run.height, rows[-1][0].height):
            rows[-1].append(run)
        else:
            rows.append([run])
    for row in rows:
        row.sort(key=lambda run: run.x0)
    return rows


def _regions(runs: list[Run], right_to_left: bool, depth: int) -> list[list[Run]]:
    if depth == _DEEPEST or len(runs) < 2:
        return [flow(runs)] if runs else []
    rows = rows_of(runs)
    gutter = _gutter(rows)
    if gutter is None:
        return [flow(runs)]
    regions: list[list[Run]] = []
    for in_columns, band in _bands(rows, gutter.at):
        runs = [run for row in band for run in row]
        if not in_columns or not _are_columns(*_sides(band, gutter.at), gutter.height):
            regions += _regions(runs, right_to_left, depth + 1)
            continue
        left, right = (_regions(sorted(side, key=_by_order), right_to_left, depth + 1) for side in _sides(band, gutter.at))
        regions += [*right, *left] if right_to_left else [*left, *right]
    return regions


def _by_order(run: Run) -> tuple[int, float]:
    return run.order, run.x0


def flow(runs: Sequence[Run]) -> list[Run]:
    """In the file's order, but for parts that were written late and stand apart, such as a heading."""
    parts: list[list[Run]] = []
    for run in sorted(runs, key=_by_order):
        if not parts or run.middle > parts[-1][-1].middle + 0.6 * run.height:
            parts.append([])
        parts[-1].append(run)
    spans = sorted(((min(r.y0 for r in part), max(r.y1 for r in part), part) for part in parts), key=lambda s: -s[1])
    apart = all(above[0] > below[1] - 3 for above, below in pairwise(spans))
    return [run for _, _, part in spans for run in part] if apart else [run for part in parts for run in part]


# --- the strip between two columns ---


@dataclass(frozen=True)
class _Gutter:
    at: float
    height: float  # of a line


def _gutter(rows: list[Row]) -> _Gutter | None:
    """The strip that parts most lines into columns, if there is one."""
    if len(rows) < _LINES:
        return None
    height = median(run.height for row in rows for run in row)
    spans = [_spans(row) for row in rows]
    left = min(span[0] for row in spans for span in row)
    right = max(span[1] for row in spans for span in row)
    # As many points as a page is wide; what is far outside of it is not read in columns.
    if not 2 * _WIDTH * height < right - left < 4000:
        return None
    crossed = [0] * (int(right - left) + 3)
    for row in spans:
        for start, end in row:
            crossed[int(start - left)] += 1
            crossed[int(end - left) + 1] -= 1
    crossed = list(accumulate(crossed))
    best, most = None, 0
    for at in _valleys(crossed, int(_WIDTH * height), max(3, int(_GAP * height))):
        gutter = _Gutter(left + at, height)
        parted = 0
        for in_columns, band in _bands(rows, gutter.at):
            if in_columns and _are_columns(*_sides(band, gutter.at), height):
                parted += len(band)
        if parted > most:
            best, most = gutter, parted
    return best


def _valleys(crossed: list[int], margin: int, least: int) -> list[float]:
    """The middles of strips that fewer lines cross than what is left and right of them, the emptiest first."""
    before = list(accumulate(crossed, max))
    after = list(accumulate(reversed(crossed), max))[::-1]
    found: list[tuple[int, float]] = []
    at = margin
    while at < len(crossed) - margin:
        if crossed[at] > 0.75 * min(before[at], after[at]):
            at += 1
            continue
        begun = at
        while at < len(crossed) - margin and crossed[at] <= 0.75 * min(before[at], after[at]):
            at += 1
        if at - begun >= least:
            lowest = min(crossed[begun:at])
            deep = [x for x in range(begun, at) if crossed[x] == lowest]
            found.append((lowest, (deep[0] + deep[-1] + 1) / 2))
    return [middle for _, middle in sorted(found)[:_TRIED]]


def _spans(row: Row) -> list[tuple[float, float]]:
    """Where a line has ink: words with no more than a blank between them are one span."""
    words = sorted((word for run in row for word in run.words), key=lambda word: word.x0)
    gap = _GAP * min(run.height for run in row)
    spans = [[words[0].x0, words[0].x1]]
    for word in words[1:]:
        if word.x0 - spans[-1][1] < gap:
            spans[-1][1] = max(spans[-1][1], word.x1)
        else:
            spans.append([word.x0, word.x1])
    return [(start, end) for start, end in spans]


def _bands(rows: list[Row], at: float) -> Iterator[tuple[bool, list[Row]]]:
    """Lines that follow one another, by whether they keep clear of `at`."""
    body = median(run.size for row in rows for run in row)
    band: list[Row] = []
    clear = False
    for index, row in enumerate(rows):
        keeps = all(not start < at < end for start, end in _spans(row)) and not _spans_columns(rows, index, at, body)
        if band and keeps != clear:
            yield clear, band
            band = []
        band.append(row)
        clear = keeps
    if band:
        yield clear, band


def _spans_columns(rows: list[Row], index: int, at: float, body: float) -> bool:
    """Whether a line is a short heading over both columns: large letters on one side, and nothing beside it on the other."""
    row = rows[index]
    if row[0].size < _LARGE * body or (row[0].x0 < at < row[-1].x1) or row[0].x0 > at:
        return False
    beside = (run for other in rows[max(0, index - 2) : index + 3] for run in other if run.x0 > at)
    return all(run.y0 > row[0].y1 or run.y1 < row[0].y0 for run in beside)


def _sides(band: list[Row], at: float) -> tuple[list[Run], list[Run]]:
    left: list[Run] = []
    right: list[Run] = []
    for row in band:
        for run in row:
            begun = 0
            for index in range(1, len(run.words) + 1):
                if index == len(run.words) or _is_left(run.words[index], at) != _is_left(run.words[begun], at):
                    (left if _is_left(run.words[begun], at) else right).append(run.part(begun, index))
                    begun = index
    return left, right


def _is_left(word: Word, at: float) -> bool:
    return word.x0 + word.x1 < 2 * at


def _are_columns(left: list[Run], right: list[Run], height: float) -> bool:
    return all(_is_prose(side, height) for side in (left, right))


def _is_prose(side: list[Run], height: float) -> bool:
    if len(side) < _LINES:
        return False
    rows = [row for row in rows_of(side) if not any(run.rows for run in row)]
    if len(rows) < _LINES:
        return False
    edges = [(row[0].x0, max(run.x1 for run in row)) for row in rows]
    width = max(end for _, end in edges) - min(start for start, _ in edges)
    letters = sum(len(run.text) for row in rows for run in row)
    full = sum(end - start >= _FULL * width for start, end in edges)
    return width >= _WIDTH * height and letters >= _LETTERS * len(rows) and full >= _OF_LINES * len(rows)
