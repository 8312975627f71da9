"""A PDF's lines over all its pages: running heads and feet, page numbers and footnotes stand aside from the text.

The rules, as nothing of the text may vanish unsaid:
- A line that stands at the same height at the top or bottom of pages that follow one another is a running line. It is kept
  where it first stands, and left out after that. It may hold the page's number: by a word for that, or where the line is
  also there without.
- Where it holds nothing but the page's number it is left out; the page is known of every character anyway.
- A line with another number that counts up from page to page ("Invoice No. 4711") stays on every page; a heading stays one.
- Such lines and footnotes stay on their page, but at a place where they interrupt no sentence.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ingest.parsers.outline import names_section
from ingest.parsers.pdf_page import Run

_EDGE_ROWS = 3  # at the top and the bottom of a page, where running lines stand
_SAME_HEIGHT = 4.0  # points
_LEAST_PAGES = 3
_DENSE = 0.4  # of the pages from the first to the last: some heads are on every other page
_NUMBER = re.compile(r"\d{1,6}")
_FARTHEST = 50  # of a page's number from its place in the file
_PAGE_WORDS = frozenset("page pages p pg of seite von s página pagina pag de di du la sur 第 页 頁 共".split())
_PAGE_BEFORE = re.compile(r"(?:\b(?:pages?|pg?|seite|s|p[áa]gina|pag)|第)[.:]?\s*\Z", re.IGNORECASE)
_PAGE_AFTER = re.compile(r"\s*[页頁]")
_LETTERS = re.compile(r"[^\W\d_]+")
_BESIDE_NUMBERS = re.compile(r"[\s\d.,:;~·•/|()\[\]<>«»_‐‑‒–—―-]*")
_NO_WORDS = re.compile(r"\W+")
LARGER = 1.15  # a heading's letters against the body's
_SMALL = 0.92  # a footnote's letters against the body's
_FOOTNOTE = re.compile(r"(?:\d{1,3}|[*†‡§¶]{1,3}|\(\d{1,3}\)|[a-z]\))[\s.]?\s*\S")
_CLOSING = "\"'”’»)]"
_ENDS_WITHIN = re.compile(r"(?<=\w\w)[.!?][\"'”’»)\]]{0,3} +(?=[^a-z])|[。！？][”’」』）)]{0,3}")
SENTENCE_ENDS = tuple(".!?:;。！？：；…")


@dataclass(frozen=True, slots=True)
class Line:
    """A line or a table in its place. `parts`: the pages of a table's rows, and how many are on each.

    `aside`: "top" or "bottom" for what is no part of the running text there; `region`: equal for what was read as one.
    """

    text: str
    page: int
    size: float
    x0: float
    x1: float
    middle: float
    height: float
    order: int
    region: int
    hyphen: bool = False
    rows: tuple[tuple[str, ...], ...] = ()
    parts: tuple[tuple[int, int], ...] = ()
    aside: str = ""

    @property
    def ends_sentence(self) -> bool:
        return not self.hyphen and self.text.rstrip(_CLOSING).endswith(SENTENCE_ENDS)


def lines_of(regions: Sequence[Sequence[Run]], page: int) -> list[Line]:
    """The lines of a page's regions; what PDFium parts though it stands on one line is one."""
    lines: list[Line] = []
    for number, region in enumerate(regions):
        for run in region:
            parts = ((page, len(run.rows)),) if run.rows else ()
            line = Line(run.text, page, run.size, run.x0, run.x1, run.middle, run.height, run.order, number, run.hyphen,
                        run.rows, parts)  # fmt: skip
            if lines and _is_one_line(lines[-1], line):
                lines[-1] = replace(lines[-1], text=f"{lines[-1].text} {line.text}", x1=line.x1, order=line.order,
                                    hyphen=line.hyphen)  # fmt: skip
            else:
                lines.append(line)
    return lines


def _is_one_line(before: Line, line: Line) -> bool:
    follows = before.region == line.region and before.order + 1 == line.order and line.x0 > before.x1
    return follows and not (before.rows or line.rows or before.hyphen) and abs(before.middle - line.middle) < 0.2 * line.height


def body_size(pages: Sequence[Sequence[Line]]) -> float:
    """The size that most letters have; 0 without any."""
    sizes: Counter[float] = Counter()
    for page in pages:
        for line in page:
            sizes[round(line.size, 1)] += len(line.text)
    return sizes.most_common(1)[0][0] if sizes else 0.0


def in_sequence(pages: Sequence[Sequence[Line]]) -> list[Line]:
    """All lines in the order in which they are read, asides marked, repeated running lines left out."""
    size = body_size(pages)
    marked = [_with_footnotes(page, size) for page in _without_running(pages, size)]
    texts = [[line for line in page if not line.aside] for page in marked]
    sequence: list[Line] = []
    for index, (page, text) in enumerate(zip(marked, texts, strict=True)):
        above = [line for line in page if line.aside == "top"]
        below = [line for line in page if line.aside == "bottom"]
        before, after = texts[index - 1] if index else [], texts[index + 1] if index + 1 < len(texts) else []
        rest: Sequence[Line] = text
        if above and _runs_over(before, text):
            head, rest = _parted(text, last=False)
            sequence += head
        sequence += above
        if below and _runs_over(text, after):
            head, rest = _parted(rest, last=True)
            sequence += [*head, *below, *rest]
        else:
            sequence += [*rest, *below]
    return sequence


def _parted(text: Sequence[Line], *, last: bool) -> tuple[list[Line], list[Line]]:
    """The lines in two, where the first or last sentence of a page ends: at a line's end, or else within a line.

    The first part is all of them where none does.
    """
    places = [place for place in range(1, len(text)) if text[place - 1].ends_sentence or text[place - 1].rows or text[place].rows]
    if last and text and text[-1].rows:
        places = [len(text) - 1]
    if places:
        place = places[-1] if last else places[0]
        return list(text[:place]), list(text[place:])
    for place in range(len(text) - 1, -1, -1) if last else range(len(text)):
        line = text[place]
        found = [] if line.rows else [match.end() for match in _ENDS_WITHIN.finditer(line.text)]
        ends = [end for end in found if end < len(line.text)]
        if ends:
            end = ends[-1] if last else ends[0]
            first, second = line.text[:end].rstrip(), line.text[end:]
            return [*text[:place], replace(line, text=first, hyphen=False)], [replace(line, text=second), *text[place + 1 :]]
    return list(text), []


def _runs_over(before: Sequence[Line], after: Sequence[Line]) -> bool:
    """Whether a sentence, or a table, goes on from one page to the next."""
    if not before or not after:
        return False
    last, first = before[-1], after[0]
    if last.rows or first.rows:
        return continues_table(last, first)
    return not last.ends_sentence and abs(last.size - first.size) < 0.6


def continues_table(before: Line, after: Line) -> bool:
    """Whether a table at the top of a page is the rest of the one at the bottom of the page before."""
    return (
        bool(before.rows and after.rows)
        and after.page == before.parts[-1][0] + 1
        and len(before.rows[0]) == len(after.rows[0])
        and abs(before.x0 - after.x0) < 12
    )


# --- running lines ---


_Key = tuple[str, int | None, str]  # a line around a number that counts pages, and how far it is from them; or all of it
_Place = tuple[int, float, int, str]  # page, height, place, side


def _without_running(pages: Sequence[Sequence[Line]], body: float) -> list[list[Line]]:
    seen: dict[_Key, list[_Place]] = defaultdict(list)
    edges: list[dict[int, tuple[int, str]]] = []
    for number, page in enumerate(pages):
        edge = _edge_of(page)
        edges.append(edge)
        for place, (_, side) in edge.items():
            for key in _keys(page[place], number, body):
                seen[key].append((number, page[place].middle, place, side))
    groups = [
        (key, group)
        for key, places in seen.items()
        for group in _dense(places, 2 if _is_number(key, len(pages)) else _LEAST_PAGES)
    ]
    heads = {_NO_WORDS.sub(" ", text).strip() for (text, counted, _), _ in groups if counted is None}
    found: list[dict[int, str]] = [{} for _ in pages]  # by place: what becomes of it
    for key, group in groups:
        is_number = _is_number(key, len(pages))
        stays = not is_number and not _is_head(key, heads)
        for at, (number, _, place, side) in enumerate(group):
            is_first = at == 0 or number == group[0][0]
            found[number][place] = side if stays or (is_first and not is_number) else found[number].get(place, "out")
    return [list(_kept(page, edge, marks)) for page, edge, marks in zip(pages, edges, found, strict=True)]


def _edge_of(page: Sequence[Line]) -> dict[int, tuple[int, str]]:
    """The lines in the outermost rows of a page: place → how many rows are further out, which side."""
    places = sorted(range(len(page)), key=lambda place: -page[place].middle)
    rows: list[list[int]] = []
    for place in places:
        if rows and page[rows[-1][0]].middle - page[place].middle < 0.5 * page[place].height:
            rows[-1].append(place)
        else:
            rows.append([place])
    found: dict[int, tuple[int, str]] = {}
    for side, ordered in (("bottom", rows[::-1]), ("top", rows)):
        for out, row in enumerate(ordered[: min(_EDGE_ROWS, 1 + len(rows) // 5)]):
            found |= {place: (out, side) for place in row if not page[place].rows}
    return found


def _keys(line: Line, page: int, body: float) -> Iterator[_Key]:
    """What a line may have in common with those of other pages: all of it, or all but a number that counts pages."""
    text = line.text
    yield text, None, ""
    if line.size <= body * LARGER and not names_section(text):  # headings may count up as pages do
        for number in [*_NUMBER.finditer(text)][:4]:
            yield text[: number.start()], int(number[0]) - page, text[number.end() :]


def _is_number(key: _Key, pages: int) -> bool:
    """Whether a running line says no more than which page it is on, and of how many."""
    before, counted, after = key
    if counted is None or abs(counted) > _FARTHEST:
        return False
    rest = f"{before} {after}"
    words, numbers = _LETTERS.findall(rest), _NUMBER.findall(rest)
    if numbers and (len(numbers) > 1 or int(numbers[0]) > pages + _FARTHEST or not (words or "/" in rest or "|" in rest)):
        return False
    return {word.casefold() for word in words} <= _PAGE_WORDS and bool(_BESIDE_NUMBERS.fullmatch(_LETTERS.sub("", rest)))


def _is_head(key: _Key, heads: set[str]) -> bool:
    """Whether a running line is the same on all its pages but for the page's number. Other numbers may count up as well."""
    before, counted, after = key
    if counted is None:
        return True
    is_told = _PAGE_BEFORE.search(before) or _PAGE_AFTER.match(after)
    return abs(counted) <= _FARTHEST and bool(is_told or _NO_WORDS.sub(" ", f"{before} {after}").strip() in heads)


def _dense(places: list[_Place], least: int) -> Iterator[list[_Place]]:
    """Those at one height, where they are on enough of the pages from the first to the last."""
    group: list[_Place] = []
    for place in [*sorted(places, key=lambda place: (place[1], place[0])), None]:
        if place is not None and (not group or place[1] - group[-1][1] <= _SAME_HEIGHT):
            group.append(place)
            continue
        numbers = {found[0] for found in group}
        if len(numbers) >= max(least, _DENSE * (max(numbers) - min(numbers) + 1)):
            yield sorted(group)
        group = [place] if place is not None else []


def _kept(page: Sequence[Line], edge: dict[int, tuple[int, str]], marks: dict[int, str]) -> Iterator[Line]:
    """A row counts as a running one only if the rows further out are running ones too."""
    open_rows = {("top", out) for out in range(_EDGE_ROWS)} | {("bottom", out) for out in range(_EDGE_ROWS)}
    for place, (out, side) in edge.items():
        if place not in marks:
            open_rows -= {(side, further) for further in range(out + 1, _EDGE_ROWS)}
    for place, line in enumerate(page):
        out, side = edge.get(place, (0, ""))
        mark = marks.get(place, "") if (side, out) in open_rows else ""
        if mark != "out":
            yield replace(line, aside=mark) if mark else line


# --- footnotes ---


def _with_footnotes(page: Sequence[Line], body: float) -> list[Line]:
    """The page with the small lines at the foot of a region aside, if the first of them has a footnote's mark."""
    result = list(page)
    for region in {line.region for line in page}:
        places = [place for place, line in enumerate(page) if line.region == region and not line.aside]
        begun = len(places)
        while begun > 0 and page[places[begun - 1]].size <= _SMALL * body and not page[places[begun - 1]].rows:
            begun -= 1
        while begun < len(places) and not _FOOTNOTE.match(page[places[begun]].text):
            begun += 1
        if begun:  # a page of nothing but small letters is no page of footnotes
            for place in places[begun:]:
                result[place] = replace(page[place], aside="bottom")
    return result
