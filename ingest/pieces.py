"""What the chunker packs: a section's blocks, and the pieces of blocks too long for one chunk."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from operator import add
from typing import NamedTuple

from storage.types import Block, ParsedDocument, TextTokenizer

# How good a cut before a piece is; lower is better.
BLOCK, BREAK, SENTENCE, WORD, CHARACTER, GLUED = range(6)

_DENSEST = 16  # characters a token: a longer span than the limits' tokens of these is cut without being counted
_RUN = 8  # words in a piece of a text without sentences, about
_LONGEST_RUN = 32
_LONGEST_CHARACTERS = 96
_SHORT = 400  # characters
_GAP = 4  # blanks after a piece that are counted with it: they stand between it and the next
_INDENT = 64  # an indentation longer than this is blank space, not structure
_WIDEST = 300  # characters of a table's header in a heading path
_LONGEST_HEADER = 1000  # characters of a header that are told to the reader
_SENTENCE = re.compile(r"[.!?…][\"'”’»)\]]{0,8}\s+|[。！？；!?][”’」』）)]{0,8}\s*|\n[ \t]*\n\s*")
_LINE = re.compile(r"\n+")
_WORD = re.compile(r"\S+")
_CODE = frozenset({"code", "definition"})
_HEADED = frozenset({"table", "definition"})
_LIKELY = 4  # characters a token: a section longer than the least limit's tokens of these is seldom one chunk
_SEAM = 4  # tokens: what a block counts more by itself than in its section, at most (its special tokens, its first blank)
_AT_ONCE = 2048  # spans given to a tokenizer together

Sizes = tuple[int, ...]  # a count under each limit
CountTokens = Callable[[Sequence[str]], Sequence[int]]


class Piece(NamedTuple):
    """A span packed whole. `level`: how good a cut before it is; `sizes`: its count under each limit."""

    start: int
    end: int
    level: int
    kind: str
    sizes: Sizes


class Section(NamedTuple):
    """A heading (or several with nothing between) and what stands under it. Blocks reach to the next."""

    blocks: tuple[Block, ...]

    @property
    def span(self) -> tuple[int, int]:
        return self.blocks[0].start, self.blocks[-1].end

    def header_at(self, start: int) -> str:
        """The header of the table or definition that has begun before `start`, as far as it is told; "" where none has."""
        first = bisect_right(self.blocks, start, key=lambda block: block.end)
        block = self.blocks[first] if first < len(self.blocks) else None
        if block is None or block.kind not in _HEADED or block.start >= start:
            return ""
        return block.header if len(block.header) <= _LONGEST_HEADER else block.header[:_LONGEST_HEADER] + "…"

    def headings_at(self, start: int, end: int) -> tuple[str, ...]:
        """The heading path of a chunk: that of its first text which is not itself a heading.

        A chunk that begins inside a table has the table's header at the end of its path, inside a definition its name.
        """
        first = bisect_right(self.blocks, start, key=lambda block: block.end)
        found: tuple[str, ...] = ()
        for block in islice(self.blocks, first, None):
            if block.start >= end:
                break
            found = block.headings
            inside = block.name or (_one_line(block.header) if block.kind == "table" else "")
            if inside and block.start < start:
                found = (*found, inside)
            if block.kind != "heading":
                break
        return found


def _one_line(header: str) -> str:
    """A table's header without what only draws it."""
    shown = " ".join(" ".join(line.split()) for line in header.split("\n") if any(map(str.isalnum, line)))
    return shown if len(shown) <= _WIDEST else shown[:_WIDEST] + "…"


def sections_of(document: ParsedDocument) -> Iterator[Section]:
    """The sections, covering the whole text: what no block claims belongs to the block before it."""
    run: list[Block] = []
    for block in _covering(document):
        if run and run[-1].kind != "heading" and (block.kind == "heading" or block.headings != run[-1].headings):
            yield Section(tuple(run))
            run = []
        run.append(block)
    if run:
        yield Section(tuple(run))


def _covering(document: ParsedDocument) -> Iterator[Block]:
    blocks = [block for block in document.blocks if block.start < block.end]
    starts = [block.start for block in blocks]
    length = len(document.text)
    reached = starts[0] if starts else length
    if document.text[:reached].strip():
        yield Block("paragraph", 0, reached)
    for block, following in zip(blocks, [*starts, length][1:], strict=True):
        start = max(reached, block.start)
        if start < following:
            reached = following
            yield block._replace(start=start, end=following)


class Ruler:
    """Counts tokens of spans, so that the same text counts the same wherever it stands."""

    def __init__(
        self,
        text: str,
        tokenizer: TextTokenizer,
        max_tokens: int,
        embedder_tokens: CountTokens | None,
        embedder_limit: int | None,
    ) -> None:
        self.text = text
        self._tokenizer = tokenizer
        self._embedder = embedder_tokens if embedder_limit is not None else None
        second = () if self._embedder is None or embedder_limit is None else (embedder_limit,)
        self.limits: Sizes = (max_tokens, *second)
        self.nothing: Sizes = (0,) * len(self.limits)
        self._over: Sizes = tuple(limit + 1 for limit in self.limits)
        self._longest = _DENSEST * max_tokens

    def sizes(self, spans: Sequence[tuple[int, int]]) -> list[Sizes]:
        """The spans' counts under each limit. One over the first limit is not counted for the embedder."""
        found: list[Sizes] = []
        for some in _batches(spans):
            found += self._sizes(some)
        return found

    def _sizes(self, spans: Sequence[tuple[int, int]]) -> list[Sizes]:
        text, over = self.text, self._over
        sizes = [over] * len(spans)
        kept: list[tuple[int, int, int]] = []  # number, start and end of those that are not surely too long
        whole: list[str] = []
        for number, (start, last) in enumerate(spans):
            start, end = self.trimmed(start, last)
            if end - start <= self._longest:
                kept.append((number, start, end))
                whole.append(text[start : min(last, end + _GAP)])
        tokens = self._tokenizer.count_batch(whole)
        if self._embedder is None:
            for (number, _, _), count in zip(kept, tokens, strict=True):
                sizes[number] = (count,)
            return sizes
        most = self.limits[0]
        short = [(number, count, text[a:b]) for (number, a, b), count in zip(kept, tokens, strict=True) if count <= most]
        for (number, count, _), second in zip(short, self._embedder([each for _, _, each in short]), strict=True):
            sizes[number] = (count, second)
        return sizes

    def fit_whole(self, sections: Sequence[Section]) -> list[bool]:
        """Whether each section surely fits into a chunk, also if its blocks are counted one by one: then they need not be."""
        longest = _LIKELY * min(self.limits)
        numbers, spans = [], []
        for number, section in enumerate(sections):
            start, end = section.span
            if end - start <= longest:
                numbers.append(number)
                spans.append((start, end))
        fit = [False] * len(sections)
        for number, sizes in zip(numbers, self.sizes(spans), strict=True):
            seams = _SEAM * (len(sections[number].blocks) - 1)
            fit[number] = all(size + seams <= limit for size, limit in zip(sizes, self.limits, strict=True))
        return fit

    def fits(self, sizes: Sizes, taken: Sizes) -> bool:
        """Whether something of these sizes goes into a chunk beside what has taken its place already."""
        for size, there, limit in zip(sizes, taken, self.limits, strict=True):
            if size + there > limit:
                return False
        return True

    def ids(self, start: int, end: int) -> tuple[int, ...]:
        """The token ids of exactly this span."""
        return tuple(self._tokenizer.encode(self.text[start:end]))

    def ids_within_limits(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, ...] | None]:
        """The token ids of each span that keeps all limits, else None."""
        found: list[tuple[int, ...] | None] = []
        for some in _batches(spans):
            texts = [self.text[start:end] for start, end in some]
            counts = self._embedder(texts) if self._embedder is not None else (0,) * len(texts)
            for ids, count in zip(self._tokenizer.encode_batch(texts), counts, strict=True):
                found.append(tuple(ids) if len(ids) <= self.limits[0] and count <= self.limits[-1] else None)
        return found

    def trimmed(self, start: int, end: int) -> tuple[int, int]:
        """The span without blank lines before and blanks after it; its first line keeps its indentation."""
        shown = self.text[start:end].rstrip()
        end = start + len(shown)
        if shown and not shown[0].isspace():
            return start, end
        first = end - len(shown.lstrip())
        line = self.text.rfind("\n", start, first) + 1 or start
        return (line if first - line <= _INDENT else first), end

    def finer(self, piece: Piece) -> list[Piece]:
        """A piece's parts, where its counted size proved too low; the piece itself if it is one character."""
        if piece.end - piece.start <= 1:
            return [piece]
        for level in (SENTENCE, WORD, CHARACTER):
            spans = list(_divide(self.text, piece.start, piece.end, level, piece.kind))
            if len(spans) > 1:
                break
        else:
            middle = (piece.start + piece.end) // 2
            spans, level = [(piece.start, middle), (middle, piece.end)], CHARACTER
        return [
            Piece(a, b, piece.level if a == piece.start else level, piece.kind, sizes)
            for (a, b), sizes in zip(spans, self.sizes(spans), strict=True)
        ]


def _batches(spans: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    return (spans[start : start + _AT_ONCE] for start in range(0, len(spans), _AT_ONCE))


def pieces_of(section: Section, ruler: Ruler, sizes: Iterable[Sizes] | None = None) -> list[Piece]:
    """The section in pieces: blocks that fit whole, and parts of those that do not. `sizes`: the blocks', if they are known."""
    pieces: list[Piece] = []
    sizes = ruler.sizes([(block.start, block.end) for block in section.blocks]) if sizes is None else sizes
    above = nothing = ruler.nothing  # what the headings directly above take of the next chunk
    for block, size in zip(section.blocks, sizes, strict=True):
        level = GLUED if any(above) else BLOCK
        if ruler.fits(size, above):
            pieces.append(Piece(block.start, block.end, level, block.kind, size))
        else:
            pieces += _parts(block, level, ruler, above)
        if block.kind != "heading":
            above = nothing
            continue
        above = tuple(map(add, above, size))
        if not ruler.fits(above, tuple(limit // 4 for limit in ruler.limits)):
            above = nothing  # no room for a body beside such a heading
    return pieces


def _parts(block: Block, level: int, ruler: Ruler, above: Sizes) -> list[Piece]:
    """A long block's parts, each within the limits (the first beside its heading), coarse where they fit."""
    bounds = [block.start, *(b for b in block.breaks if block.start < b < block.end), block.end]
    # Each time what is too long is divided more finely: start, end, how good a cut before it is; a piece is done.
    parts: list[tuple[int, int, int] | Piece] = [(a, b, BREAK) for a, b in pairwise(bounds)]
    parts[0] = (bounds[0], bounds[1], level)
    finer = BREAK
    while spans := [(part[0], part[1]) for part in parts if not isinstance(part, Piece)]:
        sizes = iter(ruler.sizes(spans))
        finer = min(finer + 1, CHARACTER)
        divided: list[tuple[int, int, int] | Piece] = []
        for part in parts:
            if isinstance(part, Piece):
                divided.append(part)
                continue
            (start, end, before), size = part, next(sizes)
            if end - start == 1 or ruler.fits(size, above if start == block.start else ruler.nothing):
                divided.append(Piece(start, end, before, block.kind, size))
            else:
                cuts = _divide(ruler.text, start, end, finer, block.kind)
                divided += [(a, b, before if a == start else finer) for a, b in cuts]
        parts = divided
    return [part for part in parts if isinstance(part, Piece)]


def _divide(text: str, start: int, end: int, level: int, kind: str) -> Iterator[tuple[int, int]]:
    if level == SENTENCE:
        pattern = _LINE if kind in _CODE else _SENTENCE
        cuts: Iterable[int] = [] if kind == "table" else (m.end() for m in pattern.finditer(text, start, end))
    elif level == WORD:
        cuts = _word_cuts(text, start, end)
    else:
        cuts = _character_cuts(text, start, end)
    before = start
    for position in cuts:
        if before < position < end:
            yield before, position
            before = position
    yield before, end


def _word_cuts(text: str, start: int, end: int) -> Iterator[int]:
    """Cuts before words: every eight or so, at places told by the word itself; each in a short span."""
    run = 0
    short = end - start <= _SHORT
    for match in _WORD.finditer(text, start, end):
        run += 1
        word = match[0]
        if (
            short
            or run > _LONGEST_RUN
            or len(word) > 64
            or (ord(word[0]) * 31 + ord(word[-1]) + len(word)) % _RUN == 0
        ):
            run = 0
            yield match.start()
            if len(word) > 64:
                yield match.end()


def _character_cuts(text: str, start: int, end: int) -> Iterator[int]:
    """Cuts inside a text without blanks, every 32 characters or so, never before a combining mark.

    A span too short for that is halved.
    """
    if end - start <= _LONGEST_CHARACTERS:
        middle = (start + end) // 2
        yield next((i for i in range(middle, start, -1) if not _joins(text[i])), middle)
        return
    last = start
    before = ord(text[start]) if start < end else 0
    for position in range(start + 1, end):
        code = ord(text[position])
        chosen = (before * 31 + code * 7) & 31 == 0 or position - last >= _LONGEST_CHARACTERS
        before = code
        if chosen and not _joins(text[position]):
            last = position
            yield position


def _joins(character: str) -> bool:
    return (
        unicodedata.combining(character) > 0
        or character in "\u200d\ufe0e\ufe0f"
        or "\U0001f3fb" <= character <= "\U0001f3ff"
    )
