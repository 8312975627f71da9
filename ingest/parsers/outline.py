"""Headings and numbered clauses in plain lines: "1. Definitions", "1.1 …", "Article 4", "§ 5", "第十条"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from storage.types import Anchor, Block

_WORDS = (
    "Article Section Clause Part Chapter Schedule Annex Appendix Exhibit Artikel Abschnitt Kapitel Teil "
    "Anhang Anlage Titre Chapitre Artículo Capítulo Sección Articolo Título"
).split()
_KEYWORD = re.compile(
    rf"(?P<word>{'|'.join(_WORDS)}|{'|'.join(word.upper() for word in _WORDS)}|§§?)\s*"
    r"(?P<number>\d{1,4}(?:\.\d{1,3})*[a-z]?|[IVXLC]{1,7}|[A-Z])(?P<rest>(?![\w])[^\n]{0,160})$"
)
_CJK = re.compile(
    r"第[一二三四五六七八九十百千零〇两\d]{1,9}(?P<unit>编|章|节|節|条|條|款|部分)(?P<rest>$|[\s:：、.．].{0,160}$)"
)
_NUMBER = re.compile(
    r"(?P<number>\d{1,3}(?:\.\d{1,3}){0,5})(?P<dot>[.)．、]?)(?P<rest>(?:\s+|(?<=[．、]))\S.{0,160})?$"
)
_CLAUSE = re.compile(
    r"(?:\d{1,3}(?:\.\d{1,3}){1,5}\.?|\d{1,3}[.)])\s|\(\w{1,4}\)\s|第[一二三四五六七八九十百千零〇两\d]{1,9}[条條款][\s:：、]"
)
_VERBS = re.compile(
    r"\b(?:shall|applies|apply|does|do|is|are|was|were|will|may|must|provides?|states?|requires?|contains?|"
    r"gilt|gelten|findet|bleibt|ist|sind)\b"
)
STARTS = frozenset("0123456789§第") | {word[0] for word in _WORDS}  # of a heading
CLAUSE_STARTS = frozenset("0123456789(第")
_ENDINGS = frozenset(".;,!?。；，！？…")
_SENTENCE_END = frozenset('.;:!?。；：！？…)）”"')


@dataclass(frozen=True)
class Mark:
    """What kind of heading a line is. `depth` orders numbered headings: "1." is 1, "1.1" is 2."""

    style: str
    depth: int = 0


@dataclass
class Outline:
    """The headings in force. A heading ends those of its own style, and what stands below them.

    Markup headings carry a level, numbered ones a style: a style not seen yet nests under what is there.
    """

    stack: list[tuple[Mark, str]] = field(default_factory=list)
    path: tuple[str, ...] = ()  # the titles

    def enter(self, mark: Mark, title: str) -> tuple[str, ...]:
        """The heading path from this heading on."""
        for position, (open_mark, _) in enumerate(self.stack):
            if _ends(mark, open_mark):
                del self.stack[position:]
                break
        self.stack.append((mark, title))
        self.path = tuple([title for _, title in self.stack])
        return self.path


def _ends(new: Mark, old: Mark) -> bool:
    if new.style == old.style:
        return old.depth >= new.depth
    return new.style == "level"  # markup outranks numbers guessed from lines


def heading_mark(lines: Sequence[str], index: int) -> Mark | None:
    """The mark of line `index`, if it is a numbered heading with a body, seen among its neighbours."""
    line = lines[index].strip()
    if not line or line[0] not in STARTS or len(line) > 120:
        return None
    mark = _mark_of(line)
    if mark is None or _continues_sentence(lines, index) or not _has_body(lines, index, mark):
        return None
    return mark


def names_section(line: str) -> bool:
    """Whether a line names a section by its kind and number: "Article 2", "§ 5"."""
    return bool(_KEYWORD.match(line) or _CJK.match(line))


def begins_clause(lines: Sequence[str], index: int) -> bool:
    """Whether a numbered clause begins at line `index`: its number and its body belong together."""
    line = lines[index].lstrip()
    return (
        bool(line)
        and line[0] in CLAUSE_STARTS
        and _CLAUSE.match(line) is not None
        and not (_continues_sentence(lines, index))
    )


def _mark_of(line: str) -> Mark | None:
    keyword = _KEYWORD.match(line)
    if keyword is not None:
        rest = keyword["rest"]
        return (
            Mark(keyword["word"].lower().strip("§") or "§")
            if _is_title(rest.lstrip(" \t.:–—-"), 14)
            else None
        )
    cjk = _CJK.match(line)
    if cjk is not None:
        return Mark(cjk["unit"]) if _is_title(cjk["rest"].strip(" \t　:：、.．"), 14, 30) else None
    number = _NUMBER.match(line)
    if number is None or (rest := number["rest"]) is None:
        dotted = number is not None and ("." in number["number"])
        return Mark("number", number["number"].count(".") + 1) if number is not None and dotted else None
    depth = number["number"].count(".") + 1
    marked = depth > 1 or number["dot"] or len(number["number"]) <= 2
    return Mark("number", depth) if marked and _is_title(rest.strip(), 10) else None


def _is_title(rest: str, words: int, length: int = 90) -> bool:
    """A title is short, begins with a capital (or a script without case), and is no sentence."""
    if not rest:
        return True
    if rest[-1] in _ENDINGS or len(rest) > length or len(rest.split()) > words:
        return False
    if rest[0].islower() or not (rest[0].isalpha() or rest[0] in '"“«(['):
        return False
    return not _VERBS.search(rest) and "。" not in rest and "，" not in rest and ". " not in rest


def _continues_sentence(lines: Sequence[str], index: int) -> bool:
    """Whether the line before runs on into this one, so that a number at its start is a cross-reference."""
    before = lines[index - 1].strip() if index else ""
    if not before or before[-1] in _SENTENCE_END:
        return False
    return _mark_of(before) is None and not before.startswith(("#", "=", "-"))


def _has_body(lines: Sequence[str], index: int, mark: Mark) -> bool:
    """A heading is followed by text that is neither its sibling (a list) nor the rest of its own sentence."""
    following = index + 1
    while following < len(lines) and not lines[following].strip():
        following += 1
    if following == len(lines):
        return False
    line = lines[following].strip()
    if following == index + 1 and line[0].islower():
        return False
    beside = lines[index - 1].strip() if index else ""
    return _mark_of(line) != mark and not (beside and _mark_of(beside) == mark)


def anchors_of(blocks: Sequence[Block], pages: Sequence[int] = ()) -> tuple[Anchor, ...]:
    """Anchors at each page's first character (`pages`, page 1 first) and each change of headings."""
    turns: list[tuple[int, int | None, tuple[str, ...] | None]] = [
        (start, number, None) for number, start in enumerate(pages, 1)
    ]
    turns += [(block.start, None, block.headings) for block in blocks]
    page: int | None = None
    headings: tuple[str, ...] = ()
    anchors: list[Anchor] = []
    for start, new_page, new_headings in sorted(turns, key=lambda turn: turn[0]):
        changed = new_page is not None or (new_headings is not None and new_headings != headings)
        page = page if new_page is None else new_page
        headings = headings if new_headings is None else new_headings
        if changed and anchors and anchors[-1].start == start:
            anchors[-1] = Anchor(start, page, headings)
        elif changed:
            anchors.append(Anchor(start, page, headings))
    return tuple(anchors)
