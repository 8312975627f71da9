"""Cuts a document into chunks: whole blocks of one section first, then the places where a long one may part.

Every chunk is an exact span of the text, and together they cover each non-blank character once. Sections pack
on their own, and within a long section the cuts are chosen by what stands at them, not by what came before:
after an insertion the old cuts are soon found again, so that the chunks beyond keep their text and their KV.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from ingest.pieces import GLUED, CountTokens, Piece, Ruler, Section, pieces_of, sections_of
from storage.types import Chunk, ParsedDocument, TextTokenizer

VERSION = 3  # of the cuts and what is kept beside them: a change of any is a new version
_LEAST = 16  # tokens: less would not hold a single character in every tokenizer
_HASHED = 48  # characters that identify a place to cut


def cut(
    document: ParsedDocument,
    tokenizer: TextTokenizer,
    *,
    max_tokens: int,
    embedder_tokens: CountTokens | None = None,
    embedder_limit: int | None = None,
) -> list[Chunk]:
    """The chunks of a document in order, none over `max_tokens` of the reader or the embedder's limit. Tokenizers are given
    many texts at a time."""
    ruler = Ruler(document.text, tokenizer, max_tokens, embedder_tokens, embedder_limit)
    if min(ruler.limits) < _LEAST:
        raise ValueError(f"a chunk must be allowed at least {_LEAST} tokens")
    place = _Places(document)
    chunks: list[Chunk] = []
    runs = list(_runs(document, ruler))
    spans = [ruler.trimmed(run.start, run.end) for run in runs]
    for run, (start, end), ids in zip(runs, spans, ruler.ids_within_limits(spans), strict=True):
        if start == end:
            continue
        for a, b, some in [(start, end, ids)] if ids is not None else _verified(run.pieces(ruler), ruler):
            chunks.append(place.chunk(len(chunks), a, b, some, run.section))
    return chunks


# --- packing ---


class _Run(NamedTuple):
    """A span of a section that makes a chunk by count."""

    section: Section
    start: int
    end: int
    packed: Sequence[Piece] | None = None  # None: the whole section

    def pieces(self, ruler: Ruler) -> Sequence[Piece]:
        return pieces_of(self.section, ruler) if self.packed is None else self.packed


def _runs(document: ParsedDocument, ruler: Ruler) -> Iterator[_Run]:
    sections = list(sections_of(document))
    whole = ruler.fit_whole(sections)
    spans = [block[1:3] for section, one in zip(sections, whole, strict=True) if not one for block in section.blocks]
    sizes = iter(ruler.sizes(spans))
    for section, one in zip(sections, whole, strict=True):
        if one:
            yield _Run(section, *section.span)
        else:
            yield from _pack(section, pieces_of(section, ruler, islice(sizes, len(section.blocks))), ruler)


def _pack(section: Section, pieces: Sequence[Piece], ruler: Ruler) -> Iterator[_Run]:
    columns = zip(*(piece.sizes for piece in pieces), strict=True)
    sums = [list(accumulate(column, initial=0)) for column in columns]
    start = 0
    while start < len(pieces):
        end = _end_of_run(pieces, sums, start, ruler)
        yield _Run(section, pieces[start].start, pieces[end - 1].end, pieces[start:end])
        start = end


def _end_of_run(pieces: Sequence[Piece], sums: Sequence[Sequence[int]], start: int, ruler: Ruler) -> int:
    furthest, nearest = len(pieces), len(pieces)
    for total, limit in zip(sums, ruler.limits, strict=True):
        furthest = min(furthest, bisect_right(total, total[start] + limit, lo=start) - 1)
        nearest = min(nearest, bisect_left(total, total[start] + limit // 2, lo=start))
    if furthest == len(pieces):
        return furthest
    if furthest <= start:
        return start + 1  # one piece that is too long by count: it is cut when verified
    window = range(max(start + 1, nearest), furthest + 1)
    best = min((pieces[i].level for i in window), default=GLUED)
    if best == GLUED:  # nothing but a heading's end in the second half: cut earlier rather than part the two
        window = range(start + 1, furthest + 1)
        best = min(pieces[i].level for i in window)
        return max(i for i in window if pieces[i].level == best)
    return min(
        (i for i in window if pieces[i].level == best),
        key=lambda i: (_fingerprint(ruler.text, pieces[i]), -i),
    )


def _fingerprint(text: str, piece: Piece) -> int:
    """A number that depends on nothing but the text after a cut."""
    return zlib.crc32(text[piece.start : piece.start + _HASHED].encode("utf-8", "surrogatepass"))


# --- verifying ---


def _verified(pieces: Sequence[Piece], ruler: Ruler) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Span and token ids of the chunk these pieces make, or of several where counts had been too low."""
    stack = [pieces]
    while stack:
        run = stack.pop()
        span = ruler.trimmed(run[0].start, run[-1].end)
        if span[0] == span[1]:
            continue
        (ids,) = ruler.ids_within_limits([span])
        if ids is not None:
            yield *span, ids
            continue
        if all(piece.level == GLUED for piece in run[1:]):  # one piece, or headings and one
            run = [*run[:-1], *ruler.finer(run[-1])]
        if len(run) == 1:  # a single character: nothing is left to cut
            yield *span, ruler.ids(*span)
            continue
        middle = _middle(run)
        stack += [run[middle:], run[:middle]]


def _middle(run: Sequence[Piece]) -> int:
    """Where to halve a run: the strongest cut in its middle half, after a heading only if need be."""
    quarter = len(run) // 4
    window = range(max(1, quarter), max(2, len(run) - quarter))
    if all(run[i].level == GLUED for i in window):
        window = range(1, len(run))
    return min(window, key=lambda i: (run[i].level, abs(i - len(run) // 2)))


# --- where a chunk stands ---


class _Places:
    """Lines and pages of spans of one document."""

    def __init__(self, document: ParsedDocument) -> None:
        self._text = document.text
        self._pages = [(anchor.start, anchor.page) for anchor in document.anchors]
        if all(page is None for _, page in self._pages):
            self._pages = []  # a format without pages
        self._counted, self._line = 0, 1

    def chunk(self, ordinal: int, start: int, end: int, ids: tuple[int, ...], section: Section) -> Chunk:
        """The finished chunk. Spans must come in order: lines are counted on from the last."""
        first, last = self._line_at(start), self._line_at(end - 1)
        text, headings, header = self._text[start:end], section.headings_at(start, end), section.header_at(start)
        pages = (self._page_at(start), self._page_at(end - 1)) if self._pages else (None, None)
        return Chunk(ordinal, text, ids, start, end, headings, *pages, first, last, header)

    def _page_at(self, offset: int) -> int | None:
        index = bisect_right(self._pages, offset, key=lambda page: page[0]) - 1
        return self._pages[index][1] if index >= 0 else None

    def _line_at(self, offset: int) -> int:
        self._line += self._text.count("\n", self._counted, offset)
        self._counted = offset
        return self._line
