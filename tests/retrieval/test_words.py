"""Words are the same whatever else a text holds, however often they have been seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retrieval import words

MARKED = "\u0939\u093f"  # a letter and a mark: a text with it is read by the pattern that knows marks
CHARACTERS = "aBZ_.9 -\n\u2019\u201c\u2014\u00e9\u00bd\u4e2d\u6587\u0e44\u0301\u0939\u093f\u20dd\ufb01"
TEXTS = st.text(st.sampled_from(CHARACTERS), max_size=60)


@given(TEXTS | st.text(max_size=40))
def test_a_text_has_the_same_words_beside_one_with_marks(text: str) -> None:
    assert words.words(f"{text} {MARKED}") == [*words.words(text), MARKED]


@given(TEXTS)
def test_words_seen_before_are_the_same_again_in_texts_and_in_queries(text: str) -> None:
    first, asked = words.words(text), words.query_words(text)
    assert (words.words(text), words.query_words(text)) == (first, asked)
    words._of_match.cache_clear()
    assert (words.query_words(text), words.words(text)) == (asked, first)


def test_runs_that_are_very_long_are_not_remembered() -> None:
    words._of_match.cache_clear()
    assert words.words("x" * 10_000 + " kiwi") == ["x" * words.LONGEST, "kiwi"]
    assert words._of_match.cache_info().currsize == 1


def test_a_lone_character_begins_words_in_a_query_also_where_a_text_held_it_before() -> None:
    assert words.words("\u4e2d") == ["\u4e2d"]
    assert words.query_words("\u4e2d") == [("\u4e2d", True)]
    assert words.words("\u4e2d\u6587") == ["\u4e2d\u6587", "\u6587"]
    assert words.query_words("\u4e2d\u6587") == [("\u4e2d\u6587", False)]
