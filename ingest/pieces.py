"""What the chunker packs: a section's blocks, and the pieces of blocks too long for one chunk."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
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
_SENTENCE = re.compile(r"[.!?…][\"'”’»)\]]{0,8}\s+|[。！？；!?][”’」』）)]{0,8}\s*|\n[ \t]*\n\s*")
_LINE = re.compile(r"\n+")
_WORD = re.compile(r"\S+")
_CODE = frozenset({"code", "definition"})


class Piece(NamedTuple):
    """A span packed whole. `level`: how good a cut before it is; `sizes`: its count under each limit."""

    start: int
    end: int
    level: int
    kind: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Section:
    """A heading (or several with nothing between) and what stands under it. Blocks reach to the next."""

    blocks: tuple[Block, ...]

    def headings_at(self, start: int, end: int) -> tuple[str, ...]:
        """The heading path of a chunk: that of its first text which is not itself a heading.

        A chunk that begins inside a table has the table's header at the end of its path.
        """
        first = bisect_right(self.blocks, start, key=lambda block: block.end)
        found: tuple[str, ...] = ()
        for block in islice(self.blocks, first, None):
            if block.start >= end:
                break
            found = block.headings
            if block.kind == "table" and block.header and block.start < start:
                found = (*found, _one_line(block.header))
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
        before = run[-1] if run else None
        if (
            before is not None
            and before.kind != "heading"
            and (block.kind == "heading" or block.headings != before.headings)
        ):
            yield Section(tuple(run))
            run = []
        run.append(block)
    if run:
        yield Section(tuple(run))


def _covering(document: ParsedDocument) -> Iterator[Block]:
    blocks = [block for block in document.blocks if block.start < block.end]
    length = len(document.text)
    if not length:
        return
    if not blocks or document.text[: blocks[0].start].strip():
        first = blocks[0].start if blocks else length
        yield Block("paragraph", 0, first)
    reached = 0
    for index, block in enumerate(blocks):
        following = blocks[index + 1].start if index + 1 < len(blocks) else length
        start, end = max(reached, block.start), max(reached, following)
        reached = end
        if start < end:
            yield Block(block.kind, start, end, block.headings, block.header, block.breaks)


class Ruler:
    """Counts tokens of spans, so that the same text counts the same wherever it stands."""

    def __init__(
        self,
        text: str,
        tokenizer: TextTokenizer,
        max_tokens: int,
        embedder_tokens: Callable[[str], int] | None,
        embedder_limit: int | None,
    ) -> None:
        self.text = text
        self._tokenizer = tokenizer
        self._embedder = embedder_tokens if embedder_limit is not None else None
        second = () if self._embedder is None or embedder_limit is None else (embedder_limit,)
        self.limits: tuple[int, ...] = (max_tokens, *second)
        self._longest = _DENSEST * max_tokens

    def sizes(self, start: int, end: int) -> tuple[int, ...]:
        """A span's count under each limit. One over the first limit is not counted for the embedder."""
        last = end
        start, end = self.trimmed(start, end)
        if end - start > self._longest:
            return tuple(limit + 1 for limit in self.limits)
        tokens = self._tokenizer.count(self.text[start : min(last, end + _GAP)])
        if self._embedder is None:
            return (tokens,)
        if tokens > self.limits[0]:
            return (tokens, self.limits[-1] + 1)
        return (tokens, self._embedder(self.text[start:end]))

    def fits(self, sizes: Sequence[int], taken: Sequence[int]) -> bool:
        """Whether something of these sizes goes into a chunk beside what has taken its place already."""
        for size, there, limit in zip(sizes, taken, self.limits, strict=True):
            if size + there > limit:
                return False
        return True

    def ids(self, start: int, end: int) -> tuple[int, ...]:
        """The token ids of exactly this span."""
        return tuple(self._tokenizer.encode(self.text[start:end]))

    def ids_within_limits(self, start: int, end: int) -> tuple[int, ...] | None:
        """The token ids of a span that keeps all limits, or None."""
        text = self.text[start:end]
        ids = self._tokenizer.encode(text)
        if len(ids) > self.limits[0] or (
            self._embedder is not None and self._embedder(text) > self.limits[-1]
        ):
            return None
        return tuple(ids)

    def trimmed(self, start: int, end: int) -> tuple[int, int]:
        """The span without blank lines before and blanks after it; its first line keeps its indentation."""
        text = self.text
        while end > start and text[end - 1].isspace():
            end -= 1
        first = start
        while first < end and text[first].isspace():
            first += 1
        line = text.rfind("\n", start, first) + 1 or start
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
            Piece(
                start, end, piece.level if start == piece.start else level, piece.kind, self.sizes(start, end)
            )
            for start, end in spans
        ]


def pieces_of(section: Section, ruler: Ruler) -> list[Piece]:
    """The section in pieces: blocks that fit whole, and parts of those that do not."""
    pieces: list[Piece] = []
    above = nothing = (0,) * len(ruler.limits)  # what the headings directly above take of the next chunk
    for block in section.blocks:
        level = GLUED if any(above) else BLOCK
        sizes = ruler.sizes(block.start, block.end)
        if ruler.fits(sizes, above):
            pieces.append(Piece(block.start, block.end, level, block.kind, sizes))
        else:
            pieces += _parts(block, level, ruler, above)
        if block.kind == "heading":
            above = tuple(a + b for a, b in zip(above, sizes, strict=True))
            if not ruler.fits(above, [limit // 4 for limit in ruler.limits]):
                above = nothing  # no room for a body beside such a heading
        else:
            above = nothing
    return pieces


def _parts(block: Block, level: int, ruler: Ruler, above: tuple[int, ...]) -> list[Piece]:
    """A long block's parts, each within the limits (the first beside its heading), coarse where they fit."""
    result: list[Piece] = []
    bounds = [block.start, *(b for b in block.breaks if block.start < b < block.end), block.end]
    # Spans still to do: start, end, how good a cut before it is, how finely it has been divided.
    stack = [(a, b, level if a == block.start else BREAK, BREAK) for a, b in pairwise(bounds)][::-1]
    while stack:
        start, end, before, divided = stack.pop()
        sizes = ruler.sizes(start, end)
        if end - start == 1 or ruler.fits(sizes, (0,) * len(above) if result else above):
            result.append(Piece(start, end, before, block.kind, sizes))
            continue
        finer = min(divided + 1, CHARACTER)
        spans = list(_divide(ruler.text, start, end, finer, block.kind))
        stack += [(a, b, before if a == start else finer, finer) for a, b in reversed(spans)]
    return result


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
