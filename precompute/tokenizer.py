"""The reader's tokenizer, twice: for the template, where control markers count, and for text, where they are text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from precompute.fast_tokenizer import FastTokenizer, parts_at_blanks
from storage.errors import ModelUnsupported
from storage.words import words_of


class ReaderTokenizer:
    """A `TextTokenizer`. Thread-safe: nothing is switched after construction."""

    def __init__(self, folder: Path) -> None:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise ModelUnsupported(f"the tokenizer in {folder} has no tokenizer.json, which exact text spans need")
        self.template: PreTrainedTokenizerFast = loaded
        text = loaded.backend_tokenizer.to_str()
        self._control = _unbounded(text)
        self._plain = _unbounded(text)
        self._plain.encode_special_tokens = True
        self._fast = FastTokenizer(self._plain)
        self._by_words = parts_at_blanks(self._plain)
        chat = str(getattr(loaded, "chat_template", None) or "")
        self.fingerprint = hashlib.sha256((text + "\0" + chat).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of document or user text; `<|im_end|>` and its like come out as ordinary tokens."""
        return self._fast.ids(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._fast.ids_batch(texts)

    def count_batch(self, texts: Sequence[str]) -> list[int]:
        """The length of `encode(text)` of each; where words are tokens by themselves, theirs and one for each line end: about
        as many, and the same wherever the text stands."""
        if not self._by_words:
            return self._fast.sizes(texts)
        words = words_of(texts)
        sizes = self._fast.sizes([" " + text if text else "" for text in words])
        return [size + text.count("\n") for size, text in zip(sizes, texts, strict=True)]

    def offsets(self, text: str) -> list[int]:
        """Character offset at which each token of `encode(text)` starts."""
        return [start for start, _ in self._plain.encode(text, add_special_tokens=False).offsets]

    def encode_control(self, text: str) -> list[int]:
        """Ids of our own template text, in which control markers are special tokens."""
        return list(self._control.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._plain.decode(list(ids), skip_special_tokens=True))


def _unbounded(text: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
