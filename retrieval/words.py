"""Text as words, the same at index and at query time. The databases' own parsers are never asked.

A word is a run of letters, digits and marks, after NFKC and case folding and without accents. Scripts written without
spaces become character bigrams, and each run's last character besides: so a query of one character is a prefix query
that finds it anywhere. A compound name (`parse_invoice`, `getUserName`, `java.util.List`, `12.3`) counts as itself and
as its parts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache, lru_cache

VERSION = "words-2"  # recorded with the index: change it with the rules
LONGEST = 80  # characters of a word that count
MOST_QUERY_WORDS = 64
REMEMBERED = 1 << 14  # runs of letters whose words are known, about 12 MiB
DOT = "\u00b7"  # stands for the dots of a compound: no word has one, and it is no sign in a query's grammar
# Han with extensions, kana, Hangul, Thai, Lao, Myanmar, Khmer.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3100-\u312f\u31a0-\u31bf"
    "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U000323af"
)
_COMPOUND = re.compile(r"[^_]_+[^_]|[a-z][A-Z]|[A-Z]{2}[a-z]")
_MAY_HOLD_MARKS = re.compile("[\u0300-\u1fff\u20d0-\u20ff\u2c00-\U0010ffff]")  # holds no quotation mark or dash
_DOTTED = re.compile(r"\w+(?:\.\w+)*")  # of texts without marks: ten times as fast as with them
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W_a-zA-Z\d]+")
_ACCENTS = dict.fromkeys(range(0x300, 0x370))  # of Latin, Greek and Cyrillic; in other scripts marks are letters


def words(text: str) -> list[str]:
    """All words of `text`, in order."""
    return [word for word, _ in _words(text)]


def query_words(text: str) -> list[tuple[str, bool]]:
    """Different words of a query; True where the word stands for all words that start with it."""
    found: dict[tuple[str, bool], None] = {}
    for word, lone in _words(text, query=True):
        found[word, lone] = None
        if len(found) == MOST_QUERY_WORDS:
            break
    return list(found)


def _words(text: str, query: bool = False) -> Iterator[tuple[str, bool]]:
    text = _plain(text)
    dotted = _patterns()[0] if _MAY_HOLD_MARKS.search(text) else _DOTTED
    for match in dotted.findall(text):
        yield from _of_match(match, query) if len(match) <= LONGEST else _cut(match, query)


@lru_cache(REMEMBERED)  # a few words are most of any text
def _of_match(match: str, query: bool) -> tuple[tuple[str, bool], ...]:
    return tuple(_cut(match, query))


def _cut(match: str, query: bool) -> Iterator[tuple[str, bool]]:
    _, run = _patterns()
    pieces = match.split(".")
    if len(pieces) > 1 and not run.search(match):
        yield match.replace(".", DOT).casefold()[:LONGEST], False
    for piece in pieces:
        yield from _of_piece(piece, run, query)


def _of_piece(piece: str, run: re.Pattern[str], query: bool) -> Iterator[tuple[str, bool]]:
    for part in run.split(piece):
        if not part:
            continue
        if run.fullmatch(part):
            yield from _bigrams(part, query)
        else:
            yield from ((word, False) for word in _compound(part))


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", text).translate(_ACCENTS))


def _bigrams(run: str, query: bool) -> Iterator[tuple[str, bool]]:
    for start in range(len(run) - 1):
        yield run[start : start + 2], False
    if len(run) == 1 or not query:
        yield run[-1], query


def _compound(word: str) -> Iterator[str]:
    whole = word.strip("_").casefold()[:LONGEST]
    if whole:
        yield whole
    parts = _PARTS.findall(word) if _COMPOUND.search(word) else ()
    if len(parts) > 1:
        yield from (part.casefold()[:LONGEST] for part in parts)


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Python's `\\w` lacks combining marks, without which Indic words fall apart."""
    marks = "".join(c for c in map(chr, range(0x300, 0x1F000)) if unicodedata.category(c)[0] == "M")
    word = f"[\\w{marks}]+"
    return re.compile(f"{word}(?:\\.{word})*"), re.compile(f"([{UNSPACED}]+)")
