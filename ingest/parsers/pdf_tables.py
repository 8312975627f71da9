"""Tables on a PDF page: cells between drawn lines, and words that stand one below the other in columns.

A grid of drawn lines is a table where its lines part the words and at least two rows and two columns hold some. Without
lines there must be three columns, kept clear by at least three lines of short cells; two between drawn lines above and
below. Doubtful ones stay lines: contents with leaders, listings in letters of one width, long text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from ingest.parsers.pdf_columns import Row, rows_of
from ingest.parsers.pdf_page import Page, Rule, Run, Word

_NEAR = 3.0  # points within which drawn lines meet
_MOST_RULES = 600
_MOST_LINES = 60  # of a grid's rows or columns
_LONGEST = 1500  # characters of a cell; more is text in a frame
_CELL_GAP = 1.0  # of a line's height: the least between two cells
_SHORT, _LONG = 30, 90  # characters of a cell between no lines: half of them at most, the longest
_FILLED = 0.6  # of the cells between no lines
LEADER = re.compile(r"\.{4}|\. \. \.|…")  # between an entry of the contents and its page

Cells = list[list[str]]


# --- between drawn lines ---


def take_grids(page: Page) -> None:
    """Put a run with rows in place of the words in each grid of the page's drawn lines."""
    across, down = _merged(page.across), _merged(page.down)
    if not 2 <= len(across) <= _MOST_RULES or not 1 <= len(down) <= _MOST_RULES:
        return
    for lines, posts in _grids(across, down):
        ys, xs = _edges(lines, posts), _edges(posts, lines)
        if 3 <= len(xs) <= _MOST_LINES and 3 <= len(ys) <= 4 * _MOST_LINES:
            _take_grid(page, lines, posts, xs, ys)


def _merged(rules: Iterable[Rule]) -> list[Rule]:
    """Rules that lie on one another or end to end are one."""
    merged: list[Rule] = []
    for rule in sorted(rules, key=lambda rule: (round(rule.at), rule.start)):
        last = merged[-1] if merged else None
        if last is not None and abs(last.at - rule.at) <= 1.5 and rule.start <= last.end + _NEAR:
            merged[-1] = Rule(last.at, last.start, max(last.end, rule.end))
        else:
            merged.append(rule)
    return merged


def _grids(across: list[Rule], down: list[Rule]) -> Iterator[tuple[list[Rule], list[Rule]]]:
    """Rules that hang together."""
    left = set(range(len(down)))
    todo = set(range(len(across)))
    while todo:
        lines, posts, stack = [], [], [todo.pop()]
        while stack:
            line = across[stack.pop()]
            lines.append(line)
            met = [i for i in left if _meet(line, down[i])]
            left.difference_update(met)
            posts += [down[i] for i in met]
            more = [i for i in todo if any(_meet(across[i], down[j]) for j in met)]
            todo.difference_update(more)
            stack += more
        yield lines, posts


def _meet(across: Rule, down: Rule) -> bool:
    return (
        across.start - _NEAR <= down.at <= across.end + _NEAR and down.start - _NEAR <= across.at <= down.end + _NEAR
    )


def _edges(rules: list[Rule], others: list[Rule]) -> list[float]:
    """Where rows or columns part: at rules, and at the ends of the others, where a table has no frame."""
    if not rules or not others:
        return []
    places = sorted([*(rule.at for rule in rules), min(o.start for o in others), max(o.end for o in others)])
    found = places[:1]
    for place in places[1:]:
        if place - found[-1] > _NEAR:
            found.append(place)
    return found


def _take_grid(page: Page, lines: list[Rule], posts: list[Rule], xs: list[float], ys: list[float]) -> None:
    inside: dict[int, list[tuple[int, int]]] = {}  # the place of a run → [first, last) of its words in the grid
    cells: dict[tuple[int, int], list[tuple[Word, bool]]] = {}
    cut = count = 0
    owner = _owners(lines, posts, xs, ys)
    for place, run in enumerate(page.runs):
        if run.rows or run.x1 < xs[0] or run.x0 > xs[-1] or run.y0 > ys[-1] or run.y1 < ys[0]:
            continue
        for index, word in enumerate(run.words):
            x, y = (word.x0 + word.x1) / 2, (word.y0 + word.y1) / 2
            if not (xs[0] < x < xs[-1] and ys[0] < y < ys[-1]):
                continue
            cell = (len(ys) - 1 - bisect_right(ys, y), bisect_right(xs, x) - 1)
            soft = run.hyphen and index == len(run.words) - 1
            cells.setdefault(owner[cell], []).append((word, soft))
            spans = inside.setdefault(place, [])
            if spans and spans[-1][1] == index:
                spans[-1] = (spans[-1][0], index + 1)
            else:
                spans.append((index, index + 1))
            count += 1
            cut += any(_cuts(post, word) for post in posts)
    texts = {cell: _cell_text(words) for cell, words in cells.items()}
    rows, columns = {cell[0] for cell in texts}, {cell[1] for cell in texts}
    owners = {owner[row, column] for row, column in owner if row in rows}
    if len(rows) < 2 or len(columns) < 2 or cut > count // 20 or len(texts) < 0.3 * len(owners):
        return
    if max(map(len, texts.values())) > _LONGEST:
        return
    table = [[texts.get((row, column), "") for column in range(len(xs) - 1)] for row in sorted(rows)]
    kept = [c for c in range(len(xs) - 1) if c in columns]
    _replace(page, inside, [[row[c] for c in kept] for row in table])


def _cuts(post: Rule, word: Word) -> bool:
    margin = 0.2 * (word.x1 - word.x0)
    middle = (word.y0 + word.y1) / 2
    return word.x0 + margin < post.at < word.x1 - margin and post.start < middle < post.end


def _owners(
    lines: list[Rule], posts: list[Rule], xs: list[float], ys: list[float]
) -> dict[tuple[int, int], tuple[int, int]]:
    """The cell that each place of the grid belongs to: where no line parts two places, they are one cell."""
    middles_x = [(a + b) / 2 for a, b in pairwise(xs)]
    middles_y = [(a + b) / 2 for a, b in pairwise(ys)][::-1]
    owner: dict[tuple[int, int], tuple[int, int]] = {}
    for row, y in enumerate(middles_y):
        for column, x in enumerate(middles_x):
            owner[row, column] = (row, column)
            if column and not any(abs(p.at - xs[column]) <= _NEAR and p.start <= y <= p.end for p in posts):
                owner[row, column] = owner[row, column - 1]
            elif row:
                edge = ys[len(ys) - 1 - row]
                if not any(abs(line.at - edge) <= _NEAR and line.start <= x <= line.end for line in lines):
                    owner[row, column] = owner[row - 1, column]
    return owner


def _cell_text(words: Sequence[tuple[Word, bool]]) -> str:
    parts: list[str] = []
    soft = False
    for word, hyphen in words:
        if parts and not (soft and word.text[0].isalnum()):
            parts.append("- " if soft else " ")
        parts.append(word.text)
        soft = hyphen
    return "".join(parts) + ("-" if soft else "")


def _replace(page: Page, inside: dict[int, list[tuple[int, int]]], rows: Cells) -> None:
    """Take the words out of their runs, and put the table where the first of them stood."""
    first = min(inside)
    words: list[Word] = []
    runs: list[Run] = []
    for place, run in enumerate(page.runs):
        spans = inside.get(place, [])
        words += [word for start, end in spans for word in run.words[start:end]]
        reached = 0
        for start, end in [*spans, (len(run.words), len(run.words))]:
            if reached < start:
                runs.append(run.part(reached, start))
            reached = end
        if place == first:
            runs.append(_table(words, rows, run.order, run.size))
            table = len(runs) - 1
    runs[table] = _table(words, rows, runs[table].order, runs[table].size)
    page.runs = runs


def _table(words: Sequence[Word], rows: Cells, order: int, size: float) -> Run:
    box = Word("", min(w.x0 for w in words), min(w.y0 for w in words), max(w.x1 for w in words), max(w.y1 for w in words))
    return Run(" ".join(map(" ".join, rows)), (box,), order, size, rows=tuple(map(tuple, rows)))


# --- words in columns ---


def with_aligned(region: list[Run], across: Sequence[Rule]) -> list[Run]:
    """The runs of a region in order; those of a table without a grid are one run."""
    if len(region) < 2:
        return region
    rows = rows_of(region)
    found: list[tuple[set[int], Run]] = []
    for first, last in _bands(rows, across):
        table = _aligned(rows[first:last], least=2 if _between_rules(rows[first:last], across) else 3)
        if table is not None:
            members = [run for row in rows[first:last] for run in row]
            found.append(({id(run) for run in members}, _table_of(members, table)))
    for inside, run_of_rows in found:
        begun = next(index for index, run in enumerate(region) if id(run) in inside)
        rest = [run for run in region[begun:] if id(run) not in inside]
        region = [*region[:begun], run_of_rows, *rest]
    return region


def _table_of(members: list[Run], rows: Cells) -> Run:
    first = min(members, key=lambda run: run.order)
    return _table([word for run in members for word in run.words], rows, first.order, first.size)


def _bands(rows: list[Row], across: Sequence[Rule]) -> Iterator[tuple[int, int]]:
    """Lines [first, last) one below the other that are each in several cells, or the rest of one."""
    begun, index = 0, 0
    for index, row in enumerate(rows):
        several = len(_cells_of(row)) >= 2
        apart = index > begun and rows[index - 1][0].middle - row[0].middle > 3 * row[0].height
        is_taken = any(run.rows for run in row)  # a table between drawn lines stands in it
        if is_taken or not (several or (index > begun and _hangs(rows[begun], row))) or apart:
            if index - begun >= 2:
                yield begun, index
            begun = index if several and not is_taken else index + 1
    if rows and len(rows) - begun >= 2:
        yield begun, len(rows)


def _hangs(first: Row, row: Row) -> bool:
    """Whether a line in one piece goes on in a cell of a table whose first column is not its own."""
    cells = _cells_of(first)
    return len(cells) >= 2 and row[0].x0 > cells[0][-1].x1


def _cells_of(row: Row) -> list[list[Word]]:
    """The words of a line by cell: a wide blank parts two."""
    words = sorted((word for run in row for word in run.words), key=lambda word: word.x0)
    gap = _CELL_GAP * row[0].height
    cells = [[words[0]]]
    for word in words[1:]:
        if word.x0 - max(w.x1 for w in cells[-1][-3:]) >= gap:
            cells.append([word])
        else:
            cells[-1].append(word)
    return cells


def _between_rules(rows: list[Row], across: Sequence[Rule]) -> bool:
    """Whether the lines have drawn ones of their width above and below."""
    top, bottom = rows[0][0], rows[-1][0]
    left = min(run.x0 for row in rows for run in row)
    right = max(run.x1 for row in rows for run in row)
    wide = [rule.at for rule in across if rule.start <= left + 6 and rule.end >= right - 6]
    above = any(0 <= at - top.middle <= 2 * top.height for at in wide)
    return above and any(0 <= bottom.middle - at <= 2 * bottom.height for at in wide)


def _aligned(rows: list[Row], least: int) -> Cells | None:
    """The cells of lines in columns; None if it is no table for sure."""
    lines = [_cells_of(row) for row in rows]
    edges = _corridors([word for line in lines for cell in line for word in (_extent(cell),)], rows[0][0].height)
    if len(edges) + 1 < least or len(lines) < 3:
        return None
    broken = {id(run.words[-1]) for row in rows for run in row if run.hyphen}
    found: list[list[list[tuple[Word, bool]]]] = []
    for line in lines:
        cells: list[list[tuple[Word, bool]]] = [[] for _ in range(len(edges) + 1)]
        for cell in line:
            cells[bisect_right(edges, cell[0].x0)] += [*((word, False) for word in cell[:-1]), _broken(cell[-1], broken)]
        filled = [place for place, words in enumerate(cells) if words]
        if found and len(filled) == 1 and filled[0] > 0 and found[-1][filled[0]]:
            found[-1][filled[0]] += cells[filled[0]]
        else:
            found.append(cells)
    table = [[_cell_text(words) for words in cells] for cells in found]
    return table if _is_table(table, [word for line in lines for cell in line for word in cell]) else None


def _broken(word: Word, broken: set[int]) -> tuple[Word, bool]:
    """The last word of a cell's line, and whether a hyphen, left out, breaks it. PDFium tells where the line ends with it; else
    its rule is that a letter stands before."""
    if word.text[-1] == "-" and word.text[-2:-1].isalpha():
        return replace(word, text=word.text[:-1]), True
    return word, id(word) in broken


def _extent(cell: list[Word]) -> Word:
    return Word("", cell[0].x0, cell[0].y0, max(word.x1 for word in cell), cell[0].y1)


def _corridors(cells: list[Word], height: float) -> list[float]:
    """The middles of what no cell stands in."""
    found: list[float] = []
    reached = None
    for cell in sorted(cells, key=lambda cell: cell.x0):
        if reached is not None and cell.x0 - reached >= 0.6 * height:
            found.append((reached + cell.x0) / 2)
        reached = cell.x1 if reached is None else max(reached, cell.x1)
    return found


def _is_table(table: Cells, words: list[Word]) -> bool:
    texts = [text for row in table for text in row if text]
    if len(table) < 3 or len(texts) < _FILLED * len(table) * len(table[0]):
        return False
    if any(map(LEADER.search, texts)):
        return False
    if median(map(len, texts)) > _SHORT or max(map(len, texts)) > _LONG:
        return False
    is_list = len(table[0]) == 2 and all(len(row[0]) <= 3 for row in table)
    return not is_list and not _is_monospaced(words)


def _is_monospaced(words: list[Word]) -> bool:
    """Whether letters are all of one width, as in listings."""
    widths = [(w.x1 - w.x0) / len(w.text) for w in words if len(w.text) > 1 and any(map(str.isalpha, w.text))]
    if len(widths) < 4:
        return False
    middle = median(widths)
    return sum(abs(width - middle) < 0.03 * middle for width in widths) > 0.9 * len(widths)
