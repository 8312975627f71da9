"""PDF: words put anywhere on pages. None is lost, none is doubled, and chunks cover them all."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ingest_tokens import PlainTokenizer, check_cover
from office_kit import check_blocks
from pdf_kit import font_of, put, sheet, written

from ingest.chunker import cut
from ingest.parsers import parse

PLAIN = PlainTokenizer()
PLACES = st.tuples(
    st.integers(0, 10).map(lambda x: 40 + 48 * x), st.integers(0, 27).map(lambda y: 60 + 26 * y),
    st.sampled_from([8, 10, 10, 10, 16]), st.integers(1, 6),
)  # fmt: skip
RULES = st.tuples(st.booleans(), st.integers(0, 10), st.integers(0, 20), st.integers(1, 10))
PAGES = st.lists(st.tuples(st.lists(PLACES, max_size=60, unique_by=lambda p: p[:2]), st.lists(RULES, max_size=12)), max_size=2)


LETTERS = "".join(map(chr, [*range(0x3B1, 0x3C9), *range(0x430, 0x450), *range(0x4E00, 0x4E40), *range(0xAC00, 0xAC20)])) + "ßøłđ"


@pytest.fixture(scope="module")
def font(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("font") / "boxes.ttf"
    path.write_bytes(font_of(f"{LETTERS} .0123456789"))
    return path


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.sampled_from(LETTERS), min_size=3, max_size=9), min_size=1, max_size=40, unique=True))
def test_words_in_the_letters_of_any_script_are_read_in_their_order(font: Path, words: list[str]) -> None:
    pdf = sheet()
    pdf.add_font("boxes", fname=font)
    pdf.add_page()
    pdf.set_font("boxes", size=10)
    for line in range(0, len(words), 5):
        pdf.text(50, 80 + 14 * (line // 5), " ".join(words[line : line + 5]))
    document = parse(written(pdf), "a.pdf")
    check_blocks(document)
    check_cover(document, cut(document, PLAIN, max_tokens=40))
    assert document.text.split() == words


@settings(max_examples=60)
@given(PAGES)
def test_every_word_is_read_once_wherever_it_stands_and_whatever_is_drawn_around_it(pages: list) -> None:  # type: ignore[type-arg]
    pdf = sheet()
    expected: list[str] = []
    pdf.add_page()
    put(pdf, 300, 20, "begin")
    for number, (places, rules) in enumerate(pages):
        pdf.add_page()
        for n, (x, y, size, count) in enumerate(places):
            # Words of letters only: a number may count the pages, and a word over another is read as one.
            words = ["q" + "abcdefgh"[number] + "".join("abcdefghij"[int(digit)] for digit in f"{n}{k}") for k in range(count)]
            if x + 40 * count < 560 and not any(other[1] == y and x < other[0] < x + 45 * count for other in places):
                put(pdf, x, y, " ".join(words), size)
                expected += words
        for across, x, y, length in rules:
            start, top = 40 + 48 * x, 70 + 26 * y
            pdf.line(start, top, start + 48 * length * across, top + 26 * length * (not across))
    document = parse(written(pdf), "a.pdf")
    check_blocks(document)
    check_cover(document, cut(document, PLAIN, max_tokens=40))
    assert Counter(re.findall(r"\bq[a-j]+\b", document.text)) == Counter(expected)
