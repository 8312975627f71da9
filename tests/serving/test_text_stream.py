"""Text while its tokens come: the same as all of them decoded at once, at a cost that does not grow with the answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.text import WINDOW, TextStream

# A token is a few bytes; they may be part of a character, or of none.
TOKENS = (*(bytes([b]) for b in range(256)), b" the", "é🐝".encode(), "日本".encode(), b"\xf0\x9f", b"\x90\x9d")


class Decoder:
    def __init__(self) -> None:
        self.longest = 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(ids))
        return b"".join(TOKENS[i] for i in ids).decode(errors="replace")


def streamed(ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, Decoder, TextStream]:
    decoder = Decoder()
    stream = TextStream(decoder, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.feed(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    assert stream.sent == len(stream.text)
    return stream.text, decoder, stream


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=3 * WINDOW))
def test_what_is_sent_is_what_all_tokens_say_together(ids: list[int]) -> None:
    text, _, _ = streamed(ids)
    assert text == Decoder()(ids)


TEXTS, STOPS = st.text(alphabet="ab🐝é \ufffd", max_size=4 * WINDOW), st.text(alphabet="ab🐝", min_size=1, max_size=4)


@given(TEXTS, st.lists(STOPS, max_size=3))
def test_a_stop_sequence_ends_the_text_wherever_it_stands(text: str, stop: list[str]) -> None:
    said, _, stream = streamed(list(text.encode()), stop)
    first = min((text.find(one) for one in stop if one in text), default=-1)
    assert stream.stopped == (first >= 0)
    # The first that is whole ends the text: a longer one that begins before it may not be whole yet.
    assert text.startswith(said)
    assert not any(one in said for one in stop)
    assert first < 0 or len(said) >= first
    assert first >= 0 or said == text


@pytest.mark.parametrize("token", [b" the", "日本".encode(), b"\xf0\x9f", b"\xff"])
def test_the_longest_answer_costs_a_window_for_each_token(token: bytes) -> None:
    ids = [TOKENS.index(token) if token in TOKENS else token[0]] * 5000
    _, decoder, _ = streamed(ids, ["never there"])
    assert decoder.longest <= WINDOW


def test_what_is_decoded_so_far_counts_all_that_came() -> None:
    stream = TextStream(Decoder(), ["zz"])
    for number in range(3 * WINDOW):
        stream.feed(ord("a"))
        assert stream.decoded == number + 1
    stream.feed(ord("z"))
    assert (stream.decoded, stream.sent) == (3 * WINDOW + 1, 3 * WINDOW)


def test_what_a_long_stop_sequence_holds_back_is_not_lost() -> None:
    text = "ab" * WINDOW + "the end"
    said, _, stream = streamed(list(text.encode()), ["ab" * (WINDOW // 2) + "never"])
    assert (said, stream.stopped) == (text, False)
    said, _, stream = streamed(list(text.encode()), ["ab" * (WINDOW // 2) + "the"])
    assert (said, stream.stopped) == (text[: text.index("the") - WINDOW], True)
