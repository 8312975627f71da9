"""What the chunker packs by: the same counts as ever, or every chunk of every corpus would be cut anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast_tokenizer import FAMILIES, PIECES
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from precompute.tokenizer import ReaderTokenizer
from storage.words import words_of


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ReaderTokenizer]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    PreTrainedTokenizerFast(tokenizer_object=FAMILIES[request.param]).save_pretrained(folder)
    return FAMILIES[request.param], ReaderTokenizer(folder)


@settings(max_examples=200, deadline=None)
@given(text=st.lists(PIECES, max_size=25).map("".join) | st.text(st.characters(codec="utf-8"), max_size=60))
def test_a_count_is_of_words_one_by_one_and_of_line_ends(family: tuple[Tokenizer, ReaderTokenizer], text: str) -> None:
    tokenizer, reader = family
    words = sum(len(tokenizer.encode(" " + word, add_special_tokens=False)) for word in text.split())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert reader.count_batch([text, "", text]) == [words + text.count("\n"), 0, words + text.count("\n")]
    assert reader.encode(text) == ids
    assert reader.encode_batch([text, "", text]) == [ids, [], ids]


TEXTS = st.lists(PIECES, max_size=25).map("".join) | st.text("ab \n\t\r\x0b\x0c\x1c\x1f", max_size=40) | st.text()


@given(st.lists(TEXTS | st.text("ab \n\0\x85\u3000", max_size=20), max_size=5))
def test_words_are_what_split_finds(texts: list[str]) -> None:
    assert words_of(texts) == [" ".join(text.split()) for text in texts]


def test_no_blank_of_ascii_is_forgotten() -> None:
    assert words_of([f"a{chr(code)}{chr(code)}b" for code in range(1, 128) if chr(code).isspace()]) == ["a b"] * 10
