"""A reader's tokenizer many times as fast, with the very same ids: they are what is prefilled.

`fastokens` reads the same tokenizer.json. Whether it agrees with the tokenizer it stands in for is checked when it is
loaded, on difficult texts and on every character of the alphabets; where it does not, or does not know the kind of
tokenizer, the tokenizer itself is asked, as it is for single texts that fastokens refuses.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise

import fastokens
import numpy as np
import structlog
from tokenizers import Tokenizer

log = structlog.get_logger()
_ODD = "\u180e"  # a blank to some tables of characters and none to others
_ALPHABETS = 0x3000  # below: every script that is written in letters, and the signs
_SEAM = re.compile(r"(?<=\S) (?=\S)| (?=[A-Za-z])")
_PROBES = (
    "The cap (12.50 EUR) isn't due -- 'tis \"so\"\u2026 won\u2019t 1,000,000 3rd x86_64",
    "def f(a, b):\n    return a[0] * b  # no\n\n\tx = y +\t z \r\n a\n b \n",
    "  two  blanks   three \u00a0hard\u3000wide . ... ' s 'S 'll 5 55 555 5555 \u00bd e\u0301 e \u0301",
    "\u4e2d\u6587 \u6ca1\u6709 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f642 \U0001f468\u200d\U0001f469 a\u200b b \ufb01 \u2460 \u212b \u0300x",
    "http://x.y/z?a=1&b=2 a.b@c.de <b>x</b> {{ y }} ## -- == => :: ;; \\n $1 ^2 ~ ` |x| <|im_end|> </s>",
)


class FastTokenizer:
    """`ids` is what `tokenizer` makes of a text without special tokens. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._exact = tokenizer
        self._fast = _counterpart(tokenizer)
        if self._fast is not None and not self._agrees():
            self._fast = None
        if self._fast is None:
            log.info("tokenizer_not_fast")

    @property
    def is_fast(self) -> bool:
        return self._fast is not None

    def ids(self, text: str) -> list[int]:
        """The token ids of `text`."""
        found = self._encode(text)
        return list(self._exact.encode(text, add_special_tokens=False).ids if found is None else found.ids)

    def ids_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same of each text: all in one call, if fastokens takes them all."""
        if (found := self._encode_batch(texts)) is None:
            return [self.ids(text) for text in texts]
        ids, bounds = found
        every = ids.tolist()
        return [every[start:end] for start, end in pairwise(bounds.tolist())]

    def sizes(self, texts: Sequence[str]) -> list[int]:
        """How many ids each text has."""
        found = self._encode_batch(texts)
        return np.diff(found[1]).tolist() if found is not None else [len(self.ids(text)) for text in texts]

    def _encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """The ids of all texts, one after another, and where each text's begin, and the last one's end."""
        if self._fast is None or any(_ODD in text for text in texts):
            return None
        try:
            ids, bounds = self._fast.encode_batch_flat(list(texts), split_special_tokens=self._exact.encode_special_tokens)
        except ValueError:
            return None
        return np.frombuffer(ids, "<u4"), np.frombuffer(bounds, "<i8")

    def _encode(self, text: str) -> fastokens.Encoding | None:
        if self._fast is None or _ODD in text:
            return None
        try:
            return self._fast.encode(text, split_special_tokens=self._exact.encode_special_tokens)
        except ValueError:  # a byte that the vocabulary lacks
            return None

    def _agrees(self) -> bool:
        texts = [*_PROBES, *_characters()]
        expected = [seen.ids for seen in self._exact.encode_batch(texts, add_special_tokens=False)]
        return [self.ids(text) for text in texts] == expected == self.ids_batch(texts)


def _counterpart(tokenizer: Tokenizer) -> fastokens.Tokenizer | None:
    try:
        return fastokens.Tokenizer.from_json_str(tokenizer.to_str())
    except ValueError:  # a kind of tokenizer that it does not know
        return None


def _characters() -> Iterator[str]:
    """Each character of the alphabets among letters, digits and blanks: that shows what it is held for."""
    for code in range(_ALPHABETS):
        if unicodedata.category(character := chr(code)) != "Cn":
            yield f"a{character}b 1{character}1 {character}'s"


def parts_at_blanks(tokenizer: Tokenizer) -> bool:
    """Whether a text's words can be counted by themselves: byte-level BPE, whose pre-token (of the patterns in use: GPT-2,
    cl100k, Llama 3, Qwen and their kin) has a blank at its start or nowhere before a sign. Seen on difficult texts too."""
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
    return all(_by_parts(tokenizer, probe) == tokenizer.encode(probe, add_special_tokens=False).ids for probe in _PROBES)


def _by_parts(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of the parts between seams: blanks between two signs, and those before a letter. (Not before a digit: some
    families part digits off first, and then the run of blanks before one is whole.)"""
    first, *rest = _SEAM.split(text)
    parts = [first, *(" " + part for part in rest)]
    return [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False).ids]
