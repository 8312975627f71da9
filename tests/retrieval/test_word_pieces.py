"""The fast reading of an embedder's tokens is that of its own tokenizer."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from retrieval import word_pieces
from retrieval.embedder import find_model
from retrieval.word_pieces import WordPieces

JSON = Path(find_model("embedded") / "tokenizer.json").read_text("utf-8")
LIMIT = 24
PIECES = st.sampled_from(
    [
        "a", "é", "e\u0301", "\u0301", " ", "  ", "\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "\0", "12", "'s",
        "...", "_", "中文", "🙂", "\u200d", "[CLS]", "[SEP]", "[UNK]", "\u212b", "Σ", "ΑΣ", "İ", "ß", "\ufffd", "word",
        "unaffable", "x" * 99, "\ud800", "\U000eca23",
    ]
)  # fmt: skip


def tokenizer() -> Tokenizer:
    made = Tokenizer.from_str(JSON)
    made.no_padding()
    made.no_truncation()
    return made


EXACT, CUTTER, FAST = tokenizer(), tokenizer(), WordPieces(JSON, LIMIT)
CUTTER.enable_truncation(LIMIT)


def clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=60))
def test_ids_are_those_of_the_tokenizer_cut_off_at_the_limit(text: str) -> None:
    assert FAST.ids([text, "a"]) == [CUTTER.encode(clean(text)).ids, CUTTER.encode("a").ids]


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=60))
def test_a_count_is_of_words_one_by_one(text: str) -> None:
    words = sum(len(EXACT.encode(clean(word), add_special_tokens=False)) for word in text.split())
    assert FAST.counts([text, "a"]) == [words + 2, 3]


def test_every_character_that_is_written_is_read_alike() -> None:
    characters = (c for c in map(chr, range(0x20000)) if unicodedata.category(c) not in {"Cn", "Cs", "Co"})
    texts = [f"a{c}b {c}. {c}{c}" for c in characters if not (ord(c) > 0x3000 and ord(c) % 13)]
    roomy = WordPieces(JSON, 512)
    seen = EXACT.encode_batch(texts)
    assert [text for text, ids, one in zip(texts, roomy.ids(texts), seen, strict=True) if ids != one.ids] == []


def test_the_embedders_tokenizer_is_fast() -> None:
    assert FAST.is_fast


def test_a_counterpart_that_errs_once_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(word_pieces.nanotoken.Tokenizer):
        def encode_batch_list(self, texts: list[str], **options: object) -> list[list[int]]:
            return super().encode_batch_list([text.replace("\u0e01", "a") for text in texts], **options)

    monkeypatch.setattr(word_pieces.nanotoken, "Tokenizer", Wrong)
    pieces = WordPieces(JSON, LIMIT)
    assert not pieces.is_fast
    assert pieces.ids(["\u0e01 a"]) == [EXACT.encode("\u0e01 a").ids]


def test_a_tokenizer_of_another_kind_is_read_by_itself() -> None:
    spec = json.loads(JSON)
    spec["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    other = WordPieces(json.dumps(spec), LIMIT)
    assert not other.is_fast
    assert other.counts(["foo.bar \ud800"]) == other.counts(["foo.bar ?"]) > [2]
    assert len(other.ids(["word " * 100])[0]) == LIMIT
