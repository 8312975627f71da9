"""The fast tokenizer gives the ids of the tokenizer it stands in for, in every family of tokenizers that it is used for."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from precompute import fast_tokenizer
from precompute.fast_tokenizer import FastTokenizer, parts_at_blanks

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


def byte_level(
    split: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None, without: str = ""
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = [sign for sign in pre_tokenizers.ByteLevel.alphabet() if sign != without]
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


FAST = {name: FastTokenizer(tokenizer) for name, tokenizer in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join) | st.text(max_size=60))
def test_ids_are_those_of_the_tokenizer_itself(family: str, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    expected = FAMILIES[family].encode(text, add_special_tokens=False).ids
    assert FAST[family].ids(text) == expected
    assert FAST[family].ids_batch([text, "a"])[0] == expected
    assert FAST[family].sizes(["a", text])[1] == len(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sign_that_some_take_for_a_blank_is_left_to_the_tokenizer_itself(family: str) -> None:
    texts = ["a", "a\u180eb  \u180e c\n\u180e"]
    expected = [FAMILIES[family].encode(text, add_special_tokens=False).ids for text in texts]
    assert FAST[family].ids_batch(texts) == expected == [FAST[family].ids(text) for text in texts]
    assert FAST[family].sizes(texts) == list(map(len, expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_character_that_is_written_is_read_alike(family: str) -> None:
    """Letters, digits and blanks are told apart by tables of characters, of which each library has its own."""
    scripts = (c for c in map(chr, range(0x20000)) if unicodedata.category(c) not in {"Cn", "Cs", "Co"})
    texts = [f"a{c}{c}1{c} {c}'s" for c in scripts if not (ord(c) > 0x3000 and ord(c) % 13)]
    expected = FAMILIES[family].encode_batch(texts, add_special_tokens=False)
    assert len(texts) > 10_000
    assert [text for text, seen in zip(texts, expected, strict=True) if FAST[family].ids(text) != seen.ids] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_in_use_are_fast_and_counted_by_words(family: str) -> None:
    assert FAST[family].is_fast
    assert parts_at_blanks(FAMILIES[family])


def test_control_markers_are_text_where_the_tokenizer_takes_them_for_text() -> None:
    tokenizer = byte_level(GPT2)
    marker = tokenizer.token_to_id("<|im_end|>")
    assert marker not in FastTokenizer(tokenizer).ids("a<|im_end|>b")
    tokenizer.encode_special_tokens = False
    assert marker in FastTokenizer(tokenizer).ids("a<|im_end|>b")


def test_a_byte_without_a_token_is_left_to_the_tokenizer_itself() -> None:
    tokenizer = byte_level(GPT2, without="\u0104")  # the byte 4
    fast = FastTokenizer(tokenizer)
    assert fast.is_fast
    assert fast.ids("a\x04b") == tokenizer.encode("a\x04b").ids
    assert fast.ids_batch(["a", "a\x04b"]) == [fast.ids("a"), fast.ids("a\x04b")]
    assert fast.sizes(["a", "a\x04b"]) == [1, 2]


def test_a_counterpart_that_errs_once_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fast_tokenizer._counterpart(FAMILIES["gpt2"])

    class Wrong:
        """Takes one letter for a blank."""

        def encode(self, text: str, split_special_tokens: bool) -> object:
            return right.encode(text.replace("\u0e01", " "), split_special_tokens=split_special_tokens)

    monkeypatch.setattr(fast_tokenizer, "_counterpart", lambda tokenizer: Wrong())
    fast = FastTokenizer(FAMILIES["gpt2"])
    assert not fast.is_fast
    assert fast.ids("\u0e01 a") == FAMILIES["gpt2"].encode("\u0e01 a", add_special_tokens=False).ids


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


OTHERS = [metaspace, prefixed, lower, across_blanks, with_added_words]


@pytest.mark.parametrize("make", OTHERS)
def test_words_are_not_counted_by_themselves_where_tokens_may_reach_across_blanks(make: Callable[[], Tokenizer]) -> None:
    assert not parts_at_blanks(make())


@pytest.mark.parametrize("make", OTHERS)
@settings(max_examples=100, deadline=None)
@given(text=st.lists(PIECES, max_size=25).map("".join))
def test_other_tokenizers_keep_their_ids_too(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer, fast = _other(make)
    assert fast.ids(text) == tokenizer.encode(text, add_special_tokens=False).ids


@functools.cache
def _other(make: Callable[[], Tokenizer]) -> tuple[Tokenizer, FastTokenizer]:
    return (tokenizer := make()), FastTokenizer(tokenizer)
