"""What a chunk holds, where it is cut, and that old chunks survive an edit."""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ingest_tokens import PlainTokenizer, check_cover, word_pieces

from bench.documents import generated
from ingest.chunker import VERSION, cut
from ingest.parsers import parse
from ingest.pieces import Ruler
from storage.errors import FileError
from storage.types import Block, Chunk, ParsedDocument

PLAIN = PlainTokenizer()
RNG = random.Random(11)
NAMES = ("a.txt", "a.md", "a.py", "a.js", "a.html", "a.csv", "a.rs")


def sentence(words: int, rng: random.Random = RNG) -> str:
    return " ".join(f"{rng.choice('abcdefgh')}{rng.randrange(1000)}" for _ in range(words)).capitalize() + "."


def paragraphs(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return "\n\n".join(
        " ".join(sentence(rng.randint(5, 14), rng) for _ in range(rng.randint(1, 4))) for _ in range(count)
    )


def plain_chunks(text: str, name: str = "a.txt", limit: int = 64) -> list[Chunk]:
    document = parse(text.encode("utf-8"), name)
    chunks = cut(document, PLAIN, max_tokens=limit)
    check_cover(document, chunks)
    assert all(len(chunk.token_ids) <= limit for chunk in chunks)
    assert all(list(chunk.token_ids) == PLAIN.encode(chunk.text) for chunk in chunks)
    return chunks


# --- properties ---


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.text(min_size=1, max_size=1500) | st.text("ab .\n#|-。é中🙂\t1", min_size=1, max_size=1500),
    st.sampled_from(NAMES),
    st.integers(16, 90),
    st.integers(16, 40) | st.none(),
)
def test_any_text_is_covered_once_within_both_limits(
    text: str, name: str, limit: int, embedder_limit: int | None
) -> None:
    text = text.encode("utf-8", "replace").decode()
    if not text.replace("\0", "").strip():
        return
    document = ParsedDocument(text, ()) if "\0" in text else _parsed(text, name)
    count = None if embedder_limit is None else lambda texts: [len(PLAIN.encode(text)) + 1 for text in texts]
    chunks = cut(document, PLAIN, max_tokens=limit, embedder_tokens=count, embedder_limit=embedder_limit)
    check_cover(document, chunks)
    for chunk in chunks:
        assert list(chunk.token_ids) == PLAIN.encode(chunk.text)
        assert len(chunk.token_ids) <= limit
        assert embedder_limit is None or len(PLAIN.encode(chunk.text)) + 1 <= embedder_limit
        assert chunk.line_start == document.text.count("\n", 0, chunk.start) + 1
        assert chunk.line_end == document.text.count("\n", 0, chunk.end - 1) + 1


def _parsed(text: str, name: str) -> ParsedDocument:
    """Through the parser where it finds text; a page may well have none."""
    try:
        return parse(text.encode("utf-8"), name)
    except FileError as error:
        assert error.code == "no_text_extracted"  # noqa: PT017
        return ParsedDocument(text, ())


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.lists(st.integers(0, 300), max_size=12), st.data())
def test_blocks_with_gaps_and_odd_breaks_lose_nothing(
    text: str, marks: list[int], data: st.DataObject
) -> None:
    edges = sorted({min(mark, len(text)) for mark in marks})
    kinds = st.sampled_from(["heading", "paragraph", "list", "table", "code", "definition"])
    blocks = tuple(
        Block(data.draw(kinds), a, b, ("h",) * data.draw(st.integers(0, 2)), "", (a, a + 1, b, b + 5))
        for a, b in zip(edges[::2], edges[1::2], strict=False)
    )
    document = ParsedDocument(text, blocks)
    check_cover(document, cut(document, PLAIN, max_tokens=20))


def test_the_real_tokenizer_of_the_embedder_in_both_places() -> None:
    pieces = word_pieces()
    text = paragraphs(60, 1) + "\n\n" + "中文字符没有空格" * 200 + "\n\n" + "x" * 4000 + "\n\n🙂 é\u0301" * 90
    document = parse(text.encode(), "a.txt")
    chunks = cut(document, pieces, max_tokens=200, embedder_tokens=pieces.count_batch, embedder_limit=100)
    check_cover(document, chunks)
    for chunk in chunks:
        assert list(chunk.token_ids) == pieces.encode(chunk.text)
        assert len(pieces.encode(chunk.text)) <= 100


MARKED = ["# H\n\n", "## I\n", "word ", "Two words.", "\n\n", "\n", "1. x\n", "中文。", "a|b\n-|-\n", "x" * 30]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(MARKED), max_size=90).map("".join), st.integers(16, 60))
def test_sections_counted_whole_are_cut_as_if_counted_by_block(text: str, limit: int) -> None:
    document, pieces = _parsed("# H\n\n" + text, "a.md"), word_pieces()

    def with_ends(texts: Sequence[str]) -> list[int]:
        return [count + 2 for count in pieces.count_batch(texts)]

    def chunks() -> list[Chunk]:
        return cut(document, pieces, max_tokens=limit, embedder_tokens=with_ends, embedder_limit=limit)

    quick = chunks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ruler, "fit_whole", lambda self, sections: [False] * len(sections))
        assert chunks() == quick


def test_cuts_are_those_of_the_version() -> None:
    """Where this fails on purpose, `VERSION` of the chunker goes up: chunks that nobody edited are computed anew."""
    spans = [
        (chunk.start, chunk.end, chunk.headings, chunk.header, len(chunk.token_ids))
        for data, name in generated(0.02)
        if not name.endswith((".pdf", ".docx", ".pptx", ".xlsx"))
        for chunk in cut(
            parse(data, name), word_pieces(), max_tokens=120, embedder_tokens=word_pieces().count_batch, embedder_limit=110
        )
    ]
    assert VERSION == 3
    assert len(spans) == 3086
    assert hashlib.sha256(repr(spans).encode()).hexdigest()[:16] == "72e87a00c3d23dda"


def test_counts_that_prove_too_low_are_mended() -> None:
    class Surprising(PlainTokenizer):
        """Tokens of a text are not the tokens of its parts: joined pieces cost twice."""

        def encode(self, text: str) -> list[int]:
            return super().encode(text) * (2 if len(text) > 60 else 1)

    document = parse(paragraphs(20, 2).encode(), "a.txt")
    chunks = cut(document, Surprising(), max_tokens=64)
    check_cover(document, chunks)
    assert all(len(chunk.token_ids) <= 64 for chunk in chunks)


def test_an_embedder_whose_counts_prove_too_low_is_obeyed() -> None:
    def count(text: str) -> int:
        return len(PLAIN.encode(text)) * (2 if len(text) > 60 else 1)

    document = parse(paragraphs(20, 2).encode(), "a.txt")
    chunks = cut(document, PLAIN, max_tokens=200, embedder_tokens=lambda texts: list(map(count, texts)), embedder_limit=50)
    check_cover(document, chunks)
    assert all(count(chunk.text) <= 50 for chunk in chunks)


def test_a_limit_that_holds_no_character_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        cut(ParsedDocument("a", ()), PLAIN, max_tokens=3)


def test_nothing_makes_no_chunks() -> None:
    assert cut(ParsedDocument("", ()), PLAIN, max_tokens=50) == []
    assert cut(ParsedDocument(" \n ", ()), PLAIN, max_tokens=50) == []


# --- structure ---


def test_a_heading_never_parts_from_its_body() -> None:
    text = "\n\n".join(f"# Heading {n}\n\n{paragraphs(1 + n % 4, n)}" for n in range(40))
    for limit in (32, 64, 200):
        for chunk in plain_chunks(text, "a.md", limit):
            assert len(chunk.text.splitlines()) > 1 or not chunk.text.startswith("#"), chunk.text


def test_a_long_heading_stays_with_the_beginning_of_a_long_body() -> None:
    heading = "# " + " ".join(f"w{n}" for n in range(21))
    for chunk in plain_chunks("\n\n".join(f"{heading}\n\n{paragraphs(4, n)}" for n in range(10)), "a.md"):
        assert chunk.text != heading


def test_headings_with_nothing_between_go_with_the_first_body() -> None:
    chunks = plain_chunks("# A\n\n## B\n\nBody.\n\n## C\n\nOther.\n", "a.md")
    assert [(c.text, c.headings) for c in chunks] == [
        ("# A\n\n## B\n\nBody.", ("A", "B")), ("## C\n\nOther.", ("A", "C")),
    ]  # fmt: skip


def test_a_long_body_begins_in_its_headings_chunk() -> None:
    chunks = plain_chunks("# Title\n\n" + " ".join(sentence(8) for _ in range(30)), "a.md")
    assert chunks[0].text.startswith("# Title\n\n")
    assert len(chunks[0].token_ids) > 32
    assert all(chunk.headings == ("Title",) for chunk in chunks)


def test_whole_paragraphs_are_packed_and_not_cut_where_they_fit() -> None:
    text = paragraphs(40, 3)
    whole = text.split("\n\n")
    for chunk in plain_chunks(text, limit=200):
        assert all(part in whole for part in chunk.text.split("\n\n"))
    assert len(plain_chunks(text, limit=200)) < len(whole) / 1.5


def test_sentences_are_kept_whole_in_a_long_paragraph() -> None:
    text = " ".join(sentence(9) for _ in range(60))
    assert all(chunk.text.endswith(".") and chunk.text[0].isupper() for chunk in plain_chunks(text))


def table(rows: int) -> str:
    lines = ["| item | price |", "|------|-------|"]
    return "\n".join([*lines, *(f"| thing {n} | {n * 7} EUR |" for n in range(rows))])


@pytest.mark.parametrize("name", ["a.md", "a.csv"])
def test_a_long_table_is_cut_between_rows_only(name: str) -> None:
    chunks = plain_chunks(table(60), name, 140)
    assert len(chunks) >= 3
    assert chunks[0].text.startswith("| item | price |\n|------|-------|\n")
    for chunk in chunks:
        assert chunk.text.startswith("| ")
        assert chunk.text.endswith(" |")
    assert sum(chunk.text.count("| item") for chunk in chunks) == 1


@pytest.mark.parametrize("name", ["a.md", "a.csv", "a.html"])
def test_a_chunk_that_begins_inside_a_table_knows_the_header_that_it_does_not_hold(name: str) -> None:
    rows = [[f"item{n}", "some words of description", str(n)] for n in range(60)]
    head = ["item", "what it is", "price in euros"]
    texts = {
        "a.md": "\n".join(["Words before.\n", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * 3, *rows))]),
        "a.csv": "\n".join(map(",".join, [head, *rows])),
        "a.html": f"<!doctype html><p>Words before.</p><table><tr><th>{'<th>'.join(head)}</tr>"
        + "".join(f"<tr><td>{'<td>'.join(r)}</tr>" for r in rows) + "</table><p>Words behind.</p>",
    }  # fmt: skip
    chunks = plain_chunks(texts[name], name)
    (first,) = [chunk for chunk in chunks if "price in euros" in chunk.text]
    assert {chunk.header for chunk in chunks[: first.ordinal + 1]} == {""}
    late = chunks[first.ordinal + 1 :]
    assert len(late) >= 3
    for chunk in late:
        begins_inside = re.search(r"item\d", chunk.text.split("\n")[0]) is not None
        assert ("price in euros" in chunk.header) == begins_inside
        assert "price in euros" not in chunk.text
        assert len(chunk.token_ids) == len(PLAIN.encode(chunk.text)) <= 64


def test_a_very_wide_header_is_told_as_far_as_it_fits() -> None:
    head = ",".join(f"column {n}" for n in range(400))
    wide = "\n".join([head, *(",".join("x" for _ in range(400)) for _ in range(40))])
    late = plain_chunks(wide, "a.csv", limit=2000)[-1]
    assert len(late.header) == 1001
    assert head.startswith(late.header.removesuffix("…"))


def test_definitions_are_kept_whole_where_they_fit() -> None:
    functions = [f"def f{n}(a, b):\n    x = a + {n}\n    return x * b" for n in range(30)]
    for chunk in plain_chunks("\n\n\n".join(functions), "a.py", 100):
        assert all(part in functions for part in chunk.text.split("\n\n\n"))


def test_a_long_function_is_cut_before_statements() -> None:
    body = "\n".join(f"    value_{n} = call(argument_{n})" for n in range(60))
    chunks = plain_chunks(f"def f():\n{body}\n", "a.py", 90)
    assert all(chunk.text.startswith("    value_") for chunk in chunks[1:])


def test_a_clause_and_its_number_share_a_chunk() -> None:
    text = "\n\n".join(
        f"{n}. Part {chr(65 + n)}\n\n" + "\n\n".join(f"{n}.{m} {sentence(12)}" for m in range(1, 7))
        for n in range(1, 9)
    )
    for chunk in plain_chunks(text, "a.txt", 80):
        assert chunk.text[0].isdigit()
        number = chunk.text.split(".")[0]
        assert chunk.headings == (f"{number}. Part {chr(65 + int(number))}",)


def test_control_markers_stay_as_they_are() -> None:
    marks = "<|im_end|>\n<|im_start|>system\nObey.<|im_end|> [INST] x [/INST] </s>"
    assert [chunk.text for chunk in plain_chunks(marks)] == [marks]


# --- stable identity ---


@pytest.mark.parametrize("name", ["a.txt", "a.md"])
@pytest.mark.parametrize("seed", range(6))
def test_a_paragraph_at_the_top_changes_few_chunks(name: str, seed: int) -> None:
    text = paragraphs(150, seed)
    before = plain_chunks(text, name, 150)
    after = plain_chunks(f"{sentence(20)}\n\n{text}", name, 150)
    new = {chunk.text for chunk in after} - {chunk.text for chunk in before}
    assert len(before) > 40
    assert len(new) <= 15


@pytest.mark.parametrize("seed", range(6))
def test_paragraphs_all_of_one_length_find_their_old_cuts_again(seed: int) -> None:
    rng = random.Random(seed)
    text = "\n\n".join(" ".join(f"w{rng.randint(1000, 9999)}" for _ in range(6)) for _ in range(300))
    before = plain_chunks(text, limit=150)
    after = plain_chunks(f"{' '.join(['w1234'] * 6)}\n\n{text}", limit=150)
    assert len({chunk.text for chunk in after} - {chunk.text for chunk in before}) < len(before) / 2


@pytest.mark.parametrize("seed", range(6))
def test_words_inside_a_text_without_blank_lines_change_few_chunks(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(chr(rng.randint(0x4E00, 0x9000)) for _ in range(3000))
    before = {chunk.text for chunk in plain_chunks(text, limit=300)}
    after = {chunk.text for chunk in plain_chunks(text[:500] + "新增的文字" + text[500:], limit=300)}
    assert len(before) > 25
    assert len(after - before) <= 8


def test_an_edit_in_one_section_leaves_the_others_alone() -> None:
    sections = [f"# S{n}\n\n{paragraphs(6, n)}" for n in range(12)]
    before = plain_chunks("\n\n".join(sections), "a.md")
    sections[4] += "\n\nAn added paragraph of some words."
    after = {chunk.text for chunk in plain_chunks("\n\n".join(sections), "a.md")}
    assert all(chunk.headings == ("S4",) for chunk in before if chunk.text not in after)


# --- places ---


def test_lines_are_counted_from_one_and_inclusive() -> None:
    chunks = plain_chunks("# A\n\nx\n\n# B\n\ny\nz\n", "a.md")
    assert [(c.line_start, c.line_end) for c in chunks] == [(1, 3), (5, 8)]


def test_pages_come_from_the_anchors() -> None:
    from storage.types import Anchor

    text = "one.\n\ntwo.\n\nthree."
    blocks = tuple(Block("paragraph", s, e) for s, e in ((0, 4), (6, 10), (12, 18)))
    anchors = (Anchor(0, 1), Anchor(6, 2), Anchor(6, 2, ("h",)), Anchor(12, 3))
    (chunk,) = cut(ParsedDocument(text, blocks, anchors), PLAIN, max_tokens=50)
    assert (chunk.page_start, chunk.page_end) == (1, 3)
    assert plain_chunks("x")[0].page_start is None


# --- speed ---

WALLS = {
    "300 KB of CJK without a blank": (
        "".join(chr(RNG.randint(0x4E00, 0x9000)) for _ in range(100_000)),
        "a.txt",
    ),
    "a line of 1 MB": (" ".join(sentence(9)[:-1] for _ in range(23_000)), "a.txt"),
    "1 MB without a blank": ("".join(RNG.choices("abcdef0123456789+/", k=1_000_000)), "a.txt"),
    "5,000 nested brackets": ("[" * 5000 + "]" * 5000, "a.md"),
    "5,000 nested brackets of code": ("x = " + "[" * 5000 + "]" * 5000, "a.py"),
    "300 KB of blanks": ("a" + " " * 300_000 + "b", "a.txt"),
    "20,000 headings": ("# h\n\n" * 20_000, "a.md"),
    "5,000 paragraphs in one section": (paragraphs(5_000, 5), "a.txt"),
}


@pytest.mark.parametrize(
    "label", [pytest.param(each, marks=pytest.mark.slow) if "1 MB" in each else each for each in WALLS]
)
def test_hostile_shapes_take_a_few_seconds_at_most(label: str) -> None:
    text, name = WALLS[label]
    pieces = word_pieces()
    document = parse(text.encode(), name)
    begun = time.process_time()
    chunks = cut(document, pieces, max_tokens=256, embedder_tokens=pieces.count_batch, embedder_limit=254)
    assert time.process_time() - begun < 8  # seconds of a busy core; three passes of the tokenizer
    check_cover(document, chunks)
