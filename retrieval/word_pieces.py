"""An embedder's tokenizer: how many tokens a text is, and the ids that its model is given.

WordPiece, the tokenizer of BERT's family, is read by `nanotoken`, many times as fast, if it is seen to agree with
the tokenizer itself on difficult texts and on every character of the alphabets.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence

import nanotoken
import numpy as np
from tokenizers import Tokenizer

from storage.words import words_of

_CACHED = 1 << 17  # words remembered by a thread, about 16 MiB
_ALPHABETS = 0x3000  # below: every script that is written in letters, and the signs
_UNSEEN = "\v\f\x1c\x1d\x1e\x1f\x85"
_PROBES = (
    "The cap (12.50 EUR) isn't due -- 'tis \"so\"\u2026 x86_64 foo_bar.baz()",
    "Stra\u00dfe \u00c5ngstr\u00f6m e\u0301 \u03a3\u03a4\u039f\u03a3 \u0130",
    "\u4e2d\u6587\u6ca1\u6709 \u65e5\u672c\u8a9e\u304c \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940",
    "[CLS] [SEP][MASK] [unk] \ufffd \x00a \x1cb \u200b \u2028",
    "\U0001f642 \U0001f468\u200d\U0001f469 \ufb01 \u2460 \u212b \u0300x", "x" * 99 + " " + "y" * 100 + " " + "z" * 101, "",
)  # fmt: skip


class WordPieces:
    """Token counts and ids, special tokens included. Threads may share it.

    A text may hold lone surrogates: they are read as `?`.
    """

    def __init__(self, tokenizer_json: str, max_tokens: int) -> None:
        self._exact, self._cutter = Tokenizer.from_str(tokenizer_json), Tokenizer.from_str(tokenizer_json)
        for tokenizer in (self._exact, self._cutter):
            tokenizer.no_padding()
            tokenizer.no_truncation()
        self._cutter.enable_truncation(max_tokens)
        self._max_tokens = max_tokens
        self._fast = _counterpart(self._exact)

    @property
    def is_fast(self) -> bool:
        return self._fast is not None

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text's words."""
        if self._fast is None:
            return [len(self._exact.encode(_clean(text))) for text in texts]
        # A text's tokens are those of its words, but for blanks that are control characters: they are not seen at all.
        some = words_of(texts) if any(map("".join(texts).__contains__, _UNSEEN)) else texts
        clean = [text.encode("utf-8", "replace") for text in some]
        counts: list[int] = np.diff(self._fast.backend.encode_batch(clean, parallel=False)[1]).tolist()
        return counts

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """What the model is given for each text: its ids, cut off at the limit."""
        if self._fast is None:
            return [list(self._cutter.encode(_clean(text)).ids) for text in texts]
        clean = [text.encode("utf-8", "replace") for text in texts]
        return self._fast.encode_batch_list(clean, max_length=self._max_tokens, parallel=False)


def _counterpart(tokenizer: Tokenizer) -> nanotoken.Tokenizer | None:
    spec = json.loads(tokenizer.to_str())
    # A tokenizer that reads across blanks has another count for the words of a text than for the text.
    whole = spec["model"]["type"] == "WordPiece" and (spec["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
    if not whole or any(" " in token["content"] for token in spec["added_tokens"]):
        return None
    nanotoken.set_cache_entries(_CACHED)
    try:
        fast = nanotoken.Tokenizer.from_json(tokenizer.to_str())
    except ValueError:  # of a kind that it does not know
        return None
    characters = filter(lambda character: unicodedata.category(character) != "Cn", map(chr, range(_ALPHABETS)))
    texts = [*_PROBES, *(f"a{character}b {character}. {character}{character}" for character in characters)]
    agree = fast.encode_batch_list(texts, parallel=False) == [one.ids for one in tokenizer.encode_batch(texts)]
    return fast if agree else None


def _clean(text: str) -> str:
    """A lone surrogate has no UTF-8, and the tokenizer would refuse it."""
    return text.encode("utf-8", "replace").decode("utf-8")
