"""Tokenising word by word with a memory, exactly: a tokenizer sees a word once, and a text costs a look-up a word.

Byte-level BPE tokenises each pre-token by itself, and its pre-tokenizer reads from left to right without looking
back: a pre-token of the patterns in use (GPT-2, cl100k, Llama 3, Qwen and their kin) has a blank at its start or
nowhere before a sign, and leaves the last blank of a run to the sign behind it. So a text may be parted before every
blank between two signs, and before every one that a letter follows, and the parts tokenised on their own. (Not so
before a digit: some families part digits off first, and then the run before one is whole.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

_SEAM = re.compile(r"(?<=\S) (?=\S)| (?=[A-Za-z])")
# Where no blank is beside another in an ASCII text, every blank is a seam, and splitting is a plain search.
_RAGGED = ("  ", "\n ", " \n", "\t", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x1f")
_MOST = 100_000  # words remembered, about 25 MB
_LONGEST = 64  # characters of a word that is remembered
_PROBES = (
    "The cap (12.50 EUR) isn't due -- 'tis \"so\"\u2026 won\u2019t 1,000,000 3rd x86_64",
    "def f(a, b):\n    return a[0] * b  # no\n\n\tx = y +\t z \r\n a\n b \n",
    "  two  blanks   three \u00a0hard\u3000wide . ... ' s 'S 'll 5 55 555 5555 \u00bd e\u0301 e \u0301",
    "\u4e2d\u6587 \u6ca1\u6709 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f642 \U0001f468\u200d\U0001f469 a\u200b b \ufb01 \u2460 \u212b \u0300x",
    "http://x.y/z?a=1&b=2 a.b@c.de <b>x</b> {{ y }} ## -- == => :: ;; \\n $1 ^2 ~ ` |x| <|im_end|> </s>",
)


class _Remembered(dict[str, Any]):
    """What a function says of a word. Safe for threads: a lost entry is made again."""

    def __init__(self, ask: Callable[[str], Any]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, word: str) -> Any:
        found = self._ask(word)
        if len(word) <= _LONGEST:
            if len(self) >= _MOST:
                self.clear()
            self[word] = found
        return found


class WordCache:
    """`ids` is what `tokenizer` makes of a text, for a tokenizer that `parts_at_blanks`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._first = _Remembered(self._encode)
        self._ids = _Remembered(lambda word: self._encode(" " + word))
        self._counts = _Remembered(lambda word: len(self._ids[word]))

    def ids(self, text: str) -> list[int]:
        """The token ids of `text`."""
        ragged = not text.isascii() or any(map(text.__contains__, _RAGGED)) or text[-1:] == " " or text[:1] == " "
        first, *rest = _SEAM.split(text) if ragged else text.split(" ")
        return [*self._first[first], *chain.from_iterable(map(self._ids.__getitem__, rest))]

    def count(self, text: str) -> int:
        """How many ids there are, give or take one or two a line."""
        words: int = sum(map(self._counts.__getitem__, text.split()))
        return words + text.count("\n")

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def parts_at_blanks(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer is one that `WordCache` reproduces: byte-level BPE, seen to agree on difficult texts."""
    spec = json.loads(tokenizer.to_str())
    steps = spec["pre_tokenizer"] or {}
    byte_level = [step for step in steps.get("pretokenizers", [steps]) if step.get("type") == "ByteLevel"]
    if spec["model"]["type"] != "BPE" or not byte_level or any(step["add_prefix_space"] for step in byte_level):
        return False
    if spec["normalizer"] is not None and spec["normalizer"]["type"] != "NFC":
        return False
    # Added words that are no control markers are found in the raw text, before all else.
    added = [token for token in spec["added_tokens"] if not token["special"]]
    if any(" " in token["content"] or token["lstrip"] or token["rstrip"] for token in added):
        return False
    cache = WordCache(tokenizer)
    return all(cache.ids(probe) == list(cache._encode(probe)) for probe in _PROBES)
