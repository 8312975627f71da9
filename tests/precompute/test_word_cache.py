"""Tokens by remembered words are the tokens of the text, in every family of tokenizers that it is used for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from precompute.word_cache import WordCache, parts_at_blanks

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The cap of 12,500 EUR isn't due.\n\n  def f(a, b):\n        return a[0]  # no\n",
    "it's the 3rd time, and\nand again\t\tand ...",
    "中文 没有空格 é e\u0301 straße 日本語", "    indented\n\n\n\nfar  apart", "'s 'll won't ## -- :: http://x.y/z?a=1",
]  # fmt: skip


def byte_level(split: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|im_end|>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 30, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return pre_tokenizers.Sequence(steps)


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
FAMILIES = {
    "gpt2": byte_level(GPT2),
    "digits": byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])),
    "cl100k": byte_level(by_pattern(CL100K)),
    "qwen": byte_level(by_pattern(QWEN), normalizers.NFC()),
    "o200k": byte_level(by_pattern(O200K)),
}
PIECES = st.sampled_from(
    ["a", "B", "é", "e\u0301", "\u0301", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "1", "234",
     "'s", "'LL", ".", "...", "(", "_", "/", "-", "中", "🙂", "\u200d", "<|im_end|>", "\u212b", "\u0390", "the", "word"]
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join) | st.text(max_size=60))
def test_ids_are_those_of_the_text_read_at_once(family: str, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = FAMILIES[family]
    assert WordCache(tokenizer).ids(text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_in_use_are_known(family: str) -> None:
    assert parts_at_blanks(FAMILIES[family])


def test_a_count_is_near_the_truth() -> None:
    text = "\n\n".join(CORPUS * 5)
    for tokenizer in FAMILIES.values():
        true = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert abs(WordCache(tokenizer).count(text) - true) <= 0.2 * true


def test_a_second_look_at_a_text_asks_the_tokenizer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WordCache(FAMILIES["gpt2"])
    text = "the same words in the same text\nand the same again"
    first = cache.ids(text)
    monkeypatch.setattr(cache, "_tokenizer", None)
    assert cache.ids(text) == first


def metaspace() -> Tokenizer:
    tokenizer = byte_level(GPT2)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def prefixed() -> Tokenizer:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def lower() -> Tokenizer:
    return byte_level(GPT2, normalizers.Lowercase())


def across_blanks() -> Tokenizer:
    return byte_level(by_pattern(r"\w+ \w+|\s+|\S+"))


def with_added_words() -> Tokenizer:
    tokenizer = byte_level(GPT2)
    tokenizer.add_tokens([AddedToken("two words", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("make", [metaspace, prefixed, lower, across_blanks, with_added_words])
def test_a_tokenizer_that_may_read_across_blanks_is_refused(make: object) -> None:
    assert callable(make)
    assert not parts_at_blanks(make())


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.word_cache._MOST", 50)
    cache = WordCache(FAMILIES["gpt2"])
    text = " ".join(f"word{n}" for n in range(500)) + " " + "x" * 5000
    assert cache.ids(text) == FAMILIES["gpt2"].encode(text, add_special_tokens=False).ids
    assert len(cache._ids) <= 50
    assert all(len(word) <= 64 for word in cache._ids)
