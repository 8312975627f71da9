"""PDF: words put anywhere on pages. None is lost, none is doubled, and chunks cover them all."""

from __future__ import annotations

import re
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_tokens import PlainTokenizer, check_cover
from office_kit import check_blocks
from pdf_kit import put, sheet, written

from ingest.chunker import cut
from ingest.parsers import parse

PLAIN = PlainTokenizer()
PLACES = st.tuples(
    st.integers(0, 10).map(lambda x: 40 + 48 * x), st.integers(0, 27).map(lambda y: 60 + 26 * y),
    st.sampled_from([8, 10, 10, 10, 16]), st.integers(1, 6),
)  # fmt: skip
RULES = st.tuples(st.booleans(), st.integers(0, 10), st.integers(0, 20), st.integers(1, 10))
PAGES = st.lists(st.tuples(st.lists(PLACES, max_size=60, unique_by=lambda p: p[:2]), st.lists(RULES, max_size=12)), max_size=2)


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
