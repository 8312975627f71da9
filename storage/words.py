"""A text's words, and nothing that stands between them: what counts of tokens by words are taken of."""

from __future__ import annotations

from collections.abc import Sequence

_BLANKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f"  # of ASCII, beside the blank itself
_SEAM = "\0"


def words_of(texts: Sequence[str]) -> list[str]:
    """`" ".join(text.split())` of each. Texts in ASCII are read together, in a few passes that make no word an object."""
    found = iter(_words_of_ascii([text for text in texts if text.isascii()]))
    return [next(found) if text.isascii() else " ".join(text.split()) for text in texts]


def _words_of_ascii(texts: Sequence[str]) -> list[str]:
    joined = _SEAM.join([text.strip() for text in texts])
    if joined.count(_SEAM) != len(texts) - 1:  # there are none, or the sign is in a text
        return [" ".join(text.split()) for text in texts]
    for blank in _BLANKS:
        joined = joined.replace(blank, " ")
    while "  " in joined:
        joined = joined.replace("  ", " ")
    return joined.split(_SEAM)
