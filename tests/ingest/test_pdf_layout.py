"""PDF: what stands where on a page. Columns, tables, running heads, footnotes; and what must not be taken for one of these."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pypdf
import pytest
from fpdf import FPDF
from ingest_tokens import PlainTokenizer, check_cover
from pdf_kit import STEP, columns, prose, put, sheet, wrapped, written

from ingest.chunker import cut
from ingest.parsers import parse
from storage.types import Block, ParsedDocument

PLAIN = PlainTokenizer()
ROWS = [["Item", "Made of", "Price"], *([f"thing{n}", f"part {n} and glue", f"{n * 7} EUR"] for n in range(1, 13))]


def read(pdf: FPDF) -> ParsedDocument:
    document = parse(written(pdf), "a.pdf")
    check_cover(document, cut(document, PLAIN, max_tokens=60))
    return document


def flat(document: ParsedDocument) -> str:
    return " ".join(document.text.split())


def tables(document: ParsedDocument) -> list[Block]:
    return [block for block in document.blocks if block.kind == "table"]


def table_lines(document: ParsedDocument) -> list[str]:
    (table,) = tables(document)
    return document.text[table.start : table.end].split("\n")


def page_of(document: ParsedDocument, text: str) -> int | None:
    at = document.text.index(text)
    return [anchor.page for anchor in document.anchors if anchor.start <= at][-1]


def page(pdf: FPDF) -> FPDF:
    pdf.add_page()
    return pdf


# --- columns ---


@pytest.mark.parametrize("by_row", [True, False], ids=["written by row", "written by column"])
@pytest.mark.parametrize("count", [2, 3])
def test_columns_are_read_one_after_the_other_whichever_way_they_were_written(count: int, by_row: bool) -> None:
    texts = [prose(name, 150) for name in "abc"[:count]]
    pdf = page(sheet())
    columns(pdf, texts, by_row=by_row)
    assert flat(read(pdf)) == " ".join(texts)


@pytest.mark.parametrize("gap", [11, 40])
def test_narrow_and_wide_gaps_part_columns(gap: float) -> None:
    texts = [prose(name, 150) for name in "ab"]
    pdf = page(sheet())
    columns(pdf, texts, gap=gap)
    assert flat(read(pdf)) == " ".join(texts)


def test_lines_of_columns_need_not_stand_at_the_same_height() -> None:
    texts = [prose(name, 200) for name in "ab"]
    pdf = page(sheet())
    left, right = (wrapped(pdf, text, 230) for text in texts)
    for row, line in enumerate(left):
        put(pdf, 50, 100 + 13 * row, line)
    for row, line in enumerate(right):
        put(pdf, 310, 104 + 14.5 * row, line)
    assert flat(read(pdf)) == " ".join(texts)


def test_a_heading_over_two_columns_is_read_before_both_and_parts_those_above_it_from_those_below() -> None:
    above, below = [prose(name, 60) for name in "ab"], [prose(name, 60) for name in "cd"]
    pdf = page(sheet())
    put(pdf, 150, 80, "The Agreement On All The Goods Of The Supplier", size=16)
    rows = columns(pdf, above)
    put(pdf, 50, 100 + rows * STEP + 10, "Part Two", size=16)
    columns(pdf, below, y=100 + rows * STEP + 40)
    document = read(pdf)
    expected = ["The Agreement On All The Goods Of The Supplier", *above, "Part Two", *below]
    assert flat(document) == " ".join(expected)
    assert [document.text[b.start : b.end] for b in document.blocks if b.kind == "heading"] == [expected[0], "Part Two"]


def test_an_abstract_over_the_full_width_comes_before_the_columns() -> None:
    abstract, *texts = prose("z", 120), prose("a", 150), prose("b", 150)
    pdf = page(sheet())
    rows = columns(pdf, [abstract], y=80)
    columns(pdf, texts, y=80 + (rows + 2) * STEP)
    assert flat(read(pdf)) == " ".join([abstract, *texts])


def test_a_word_broken_at_the_end_of_a_column_or_a_line_of_one_is_whole() -> None:
    pdf = page(sheet())
    left = [
        "the supplier of the goods deli-", "vers what the buyer has asked for",
        "and the buyer then pays the price", "so that nobody is left with a war-",
    ]  # fmt: skip
    right = [
        "ranty that says nothing of the mat-", "ter and is not worth its own paper",
        "which the parties have agreed upon", "in the year in which it was signed",
    ]  # fmt: skip
    for row, pair in enumerate(zip(left, right, strict=True)):
        for x, line in zip((50, 300), pair, strict=True):
            put(pdf, x, 100 + row * STEP, line)
    text = flat(read(pdf))
    assert "delivers what" in text
    assert "a warranty that" in text
    assert "matter and" in text


def test_hebrew_columns_are_read_from_the_right() -> None:
    names = ("DejaVuSans.ttf", "LiberationSans-Regular.ttf")
    fonts = [font for name in names for font in Path("/usr/share/fonts").rglob(name)]
    if not fonts:
        pytest.skip("no font with Hebrew letters is installed")
    pdf = page(sheet())
    pdf.add_font("hebrew", fname=str(fonts[0]))
    pdf.set_font("hebrew", size=10)
    for row in range(8):
        pdf.text(330, 100 + row * STEP, str(row) + " ןימי" * 8)
        pdf.text(50, 100 + row * STEP, str(row) + " לאמש" * 8)
    text = read(pdf).text
    assert text.rindex("ימין") < text.index("שמאל")


@pytest.mark.parametrize("quarters", [0, 90, 180, 270])
def test_a_turned_page_is_read_as_it_is_shown(quarters: int) -> None:
    texts = [prose(name, 120) for name in "ab"]
    pdf = page(sheet())
    columns(pdf, texts)
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(written(pdf)))
    content = writer.pages[0]
    if quarters:  # the content is turned one way and the page the other, as scanners and spreadsheets do
        content.add_transformation(pypdf.Transformation().rotate(quarters))
        content.rotate(quarters)
        box = {90: (-842, 0, 0, 595), 180: (-595, -842, 0, 0), 270: (0, -595, 842, 0)}[quarters]
        content.mediabox = content.cropbox = pypdf.generic.RectangleObject(box)
    out = io.BytesIO()
    writer.write(out)
    assert flat(parse(out.getvalue(), "a.pdf")) == " ".join(texts)


def test_a_page_whose_lines_stand_upright_keeps_the_order_of_the_file() -> None:
    pdf = page(sheet())
    lines = wrapped(pdf, prose("a", 80), 300)
    for row, line in enumerate(lines):
        with pdf.rotation(90, 100 + row * STEP, 700):
            put(pdf, 100 + row * STEP, 700, line)
    assert flat(read(pdf)) == prose("a", 80)


# --- tables ---


def grid(pdf: FPDF, rows: Sequence[Sequence[str]], y: float = 100, width: float = 150, lines: str = "grid") -> float:
    """A table with drawn lines (all of them, or those across), or none; where it ends."""
    x, height = 50, 18
    right, bottom = x + width * len(rows[0]), y + height * len(rows)
    for number, row in enumerate(rows):
        for column, text in enumerate(row):
            put(pdf, x + width * column + 4, y + height * number + 13, text)
    if lines == "grid":
        for number in range(len(rows) + 1):
            pdf.line(x, y + height * number, right, y + height * number)
        for column in range(len(rows[0]) + 1):
            pdf.line(x + width * column, y, x + width * column, bottom)
    if lines == "across":
        for edge in (y, y + height, bottom):
            pdf.line(x, edge, right, edge)
    return bottom


@pytest.mark.parametrize("lines", ["grid", "across", "none"])
def test_a_table_is_rows_with_bars_between_its_paragraphs(lines: str) -> None:
    pdf = page(sheet())
    put(pdf, 50, 80, "The prices are these, in the order of the catalogue.")
    bottom = grid(pdf, ROWS, lines=lines)
    put(pdf, 50, bottom + 30, "They hold until the end of the year.")
    document = read(pdf)
    assert table_lines(document) == [" | ".join(row) for row in ROWS]
    assert tables(document)[0].header == "Item | Made of | Price"
    assert document.text.startswith("The prices are")
    assert document.text.endswith("the year.")


def test_rows_are_never_cut_and_the_header_is_known_in_each_part() -> None:
    rows = [ROWS[0], *([f"thing{n}", f"made of part {n}", f"{n * 7} EUR"] for n in range(36))]
    pdf = page(sheet())
    grid(pdf, rows)
    chunks = cut(read(pdf), PLAIN, max_tokens=60)
    assert len(chunks) >= 3
    for n in range(36):
        assert sum(f"thing{n} | made of part {n} | {n * 7} EUR" in chunk.text for chunk in chunks) == 1
    assert all(chunk.headings[-1] == "Item | Made of | Price" for chunk in chunks[1:])


def test_the_library_s_own_tables_are_read_with_cells_of_several_lines_and_merged_ones() -> None:
    pdf = FPDF()
    pdf.set_font("helvetica", size=10)
    pdf.add_page()
    long = "a description that is so long that it takes several lines of its narrow cell"
    with pdf.table(col_widths=(20, 30, 20), text_align="LEFT") as table:
        table.row(["Item", "Description", "Price"])
        row = table.row()
        row.cell("Lamps of every kind", colspan=3)
        table.row(["lamp", long, "7 EUR"])
        table.row(["oil", "for the lamp", "1 EUR"])
    assert table_lines(read(pdf)) == [
        "Item | Description | Price", "Lamps of every kind", f"lamp | {long} | 7 EUR", "oil | for the lamp | 1 EUR",
    ]  # fmt: skip


def test_a_cell_over_two_rows_is_written_once() -> None:
    pdf = FPDF()
    pdf.set_font("helvetica", size=10)
    pdf.add_page()
    with pdf.table(text_align="LEFT") as table:
        table.row(["Region", "Town", "People"])
        row = table.row()
        row.cell("North", rowspan=2)
        row.cell("Aville")
        row.cell("700")
        table.row(["Beton", "900"])
        table.row(["South", "Cetown", "300"])
    lines = table_lines(read(pdf))
    assert lines[0] == "Region | Town | People"
    assert [line.count("North") for line in lines] == [0, 1, 0, 0]
    assert all(town in line for town, line in zip(("Aville", "Beton", "Cetown"), lines[1:], strict=True))


def test_text_over_squared_paper_is_no_table() -> None:
    """Lines that run through words part nothing."""
    pdf = page(sheet())
    text = prose("squared", 120)
    for number, line in enumerate(wrapped(pdf, text, 480)):
        put(pdf, 50, 100 + 26 * number, line)
    for x in range(45, 551, 84):
        pdf.line(x, 80, x, 400)
    for y in range(80, 410, 26):
        pdf.line(45, y, 549, y)
    found = read(pdf)
    assert not tables(found)
    assert " ".join(found.text.split()) == text


def test_a_table_that_goes_on_over_pages_is_one_with_its_header_once() -> None:
    pdf = sheet()
    for first in (0, 20, 40):
        page(pdf)
        put(pdf, 50, 40, "Catalogue of the supplier")
        grid(pdf, [ROWS[0], *([f"thing{n}", f"part {n}", f"{n * 7} EUR"] for n in range(first, first + 20))])
    document = read(pdf)
    assert table_lines(document) == ["Item | Made of | Price", *(f"thing{n} | part {n} | {n * 7} EUR" for n in range(60))]
    assert [page_of(document, f"thing{n} ") for n in (0, 19, 20, 39, 40, 59)] == [1, 1, 2, 2, 3, 3]


def test_a_table_within_a_column_stays_in_its_place() -> None:
    pdf = page(sheet())
    first, last, right = prose("a", 60), prose("c", 60), prose("b", 200)
    lines = wrapped(pdf, first, 235)
    for row, line in enumerate(lines):
        put(pdf, 50, 100 + row * STEP, line)
    bottom = grid(pdf, [["Town", "People"], ["Aville", "700"], ["Beton", "900"]], y=100 + len(lines) * STEP, width=115)
    for row, line in enumerate(wrapped(pdf, last, 235)):
        put(pdf, 50, bottom + 20 + row * STEP, line)
    for row, line in enumerate(wrapped(pdf, right, 235)):
        put(pdf, 310, 100 + row * STEP, line)
    document = read(pdf)
    assert flat(document) == " ".join([first, "Town | People Aville | 700 Beton | 900", last, right])
    assert len(tables(document)) == 1


def test_a_ruled_table_beside_words_and_above_a_table_without_lines_is_kept() -> None:
    pdf = page(sheet())
    grid(pdf, [["Rent", "9100"], ["Heat", "2200"]], y=60, width=50)
    put(pdf, 250, 80, "Start")
    put(pdf, 350, 80, "June")
    rows = [["Alpha", "one", "red"], ["Bravo", "two", "blue"], ["Carol", "six", "gold"], ["Delta", "ten", "pink"]]
    for number, row in enumerate(rows):
        for x, text in zip((55, 250, 350), row, strict=True):
            put(pdf, x, 112 + 14 * number, text)
    document = read(pdf)
    assert [document.text[t.start : t.end].split("\n") for t in tables(document)] == [
        ["Rent | 9100", "Heat | 2200"],
        [" | ".join(row) for row in rows],
    ]
    assert "Start June" in flat(document)


@pytest.mark.parametrize("by_row", [True, False], ids=["written by row", "written by column"])
def test_a_word_broken_in_a_cell_is_whole_without_lines_too(by_row: bool) -> None:
    pdf = page(sheet())
    rows = [["Item", "Made of", "Price"], ["lamp", "glass and alu-", "7 EUR"], ["", "minium", ""]]
    rows += [["oil", "plant-", "1 EUR"], ["", "(or whale) fat", ""], ["wick", "non-", "2 EUR"]]
    cells = [(x, y, rows[y][column]) for y in range(len(rows)) for column, x in enumerate((50, 200, 350)) if rows[y][column]]
    for x, y, text in cells if by_row else sorted(cells):
        put(pdf, x, 100 + STEP * y, text)
    assert table_lines(read(pdf)) == [
        "Item | Made of | Price", "lamp | glass and aluminium | 7 EUR", "oil | plant- (or whale) fat | 1 EUR",
        "wick | non- | 2 EUR",
    ]  # fmt: skip


# --- no tables, no columns ---


def test_contents_with_leaders_stay_lines() -> None:
    pdf = page(sheet())
    titles = ["Definitions", "Delivery of the goods", "Prices", "Liability", "Final provisions", "Annex"]
    for number, title in enumerate(titles, 1):
        put(pdf, 50, 100 + number * STEP, f"{number}.")
        put(pdf, 80, 100 + number * STEP, title + " " + "." * (70 - len(title)))
        put(pdf, 480, 100 + number * STEP, str(number * 7))
    document = read(pdf)
    assert not tables(document)
    for number, title in enumerate(titles, 1):
        line = next(line for line in document.text.split("\n") if title in line)
        assert line.startswith(f"{number}.")
        assert line.endswith(f" {number * 7}")


def test_a_listing_in_letters_of_one_width_stays_lines() -> None:
    pdf = page(sheet())
    pdf.set_font("courier", size=10)
    code = [f"{n * 4:#06x}  {op:<8}{arg:<20}; {what}" for n, (op, arg, what) in enumerate([
        ("mov", "eax, ebx", "the first operand"), ("add", "eax, 1", "one more"), ("cmp", "eax, ecx", "is it enough"),
        ("jne", "loop", "again"), ("push", "eax", "for the caller"), ("ret", "", "done"),
    ])]  # fmt: skip
    for row, line in enumerate(code):
        pdf.text(50, 100 + row * STEP, line)
    document = read(pdf)
    assert not tables(document)
    assert [line.split() for line in document.text.split("\n")] == [line.split() for line in code]


def test_a_form_is_read_line_by_line() -> None:
    pdf = page(sheet())
    fields = {"Name": "Ada Example", "Street": "1 Example Road", "Town": "Aville", "Born": "1 May 1970", "Signed": ""}
    for row, (label, value) in enumerate(fields.items()):
        put(pdf, 50, 100 + row * 24, f"{label}:")
        put(pdf, 160, 100 + row * 24, value)
        pdf.line(155, 104 + row * 24, 400, 104 + row * 24)
        pdf.rect(420, 92 + row * 24, 10, 10)
    document = read(pdf)
    assert not tables(document)
    assert document.text.split("\n") == [f"{label}: {value}".strip() for label, value in fields.items()]


def test_a_contract_in_two_languages_is_read_one_after_the_other() -> None:
    pdf = page(sheet())
    clauses = [(prose(f"e{n}x", 30), prose(f"d{n}x", 30)) for n in range(4)]
    y = 100.0
    for number, pair in enumerate(clauses, 1):
        y += 6 + STEP * columns(pdf, [f"1.{number} {text}" for text in pair], y=y)
    document = read(pdf)
    assert not tables(document)
    expected = [f"1.{number} {pair[side]}" for side in (0, 1) for number, pair in enumerate(clauses, 1)]
    assert flat(document) == " ".join(expected)


@pytest.mark.parametrize("style", ["bullets", "prose", "ragged"])
def test_ordinary_pages_have_one_column_and_no_table(style: str) -> None:
    pdf = page(sheet())
    lines = wrapped(pdf, prose("a", 300), 480 if style != "ragged" else 200)
    for row, line in enumerate(lines[:50]):
        put(pdf, 50, 60 + row * STEP, "-" if style == "bullets" and row % 3 == 0 else "")
        put(pdf, 70, 60 + row * STEP, line)
    document = read(pdf)
    assert not tables(document)
    assert flat(document).replace("- ", "") == " ".join(lines[:50])


def test_a_frame_around_text_and_a_drawing_are_no_tables() -> None:
    pdf = page(sheet())
    lines = wrapped(pdf, prose("a", 60), 400)
    for row, line in enumerate(lines):
        put(pdf, 60, 100 + row * STEP, line)
    pdf.rect(50, 85, 430, 20 + len(lines) * STEP)
    for step in range(8):  # a chart with a line at every step
        pdf.line(50, 400 + step * 20, 450, 400 + step * 20)
        pdf.line(50 + step * 50, 400, 50 + step * 50, 540)
        put(pdf, 30, 400 + step * 20, str(step))
    assert not tables(read(pdf))


# --- from page to page ---


def test_a_sentence_goes_on_over_a_page_between_running_heads_feet_and_a_footnote() -> None:
    pdf = sheet()
    texts = [prose(f"p{number}x", 66) for number in range(1, 6)]  # the last sentence of each has six words so far
    for number, text in enumerate(texts, 1):
        page(pdf)
        put(pdf, 50, 40, "Master Agreement, version 7")
        put(pdf, 480, 40, f"Page {number}")
        for row, line in enumerate(wrapped(pdf, text, 480)):
            put(pdf, 50, 100 + row * STEP, line)
        put(pdf, 50, 740, f"{number} This is the note at the foot of page{number}x.", size=7)
        put(pdf, 270, 800, f"Page {number} of 5")
    document = read(pdf)
    assert document.text.count("Master Agreement, version 7") == 1
    assert document.text.count("Page 1") == 1
    assert "Page 2" not in document.text  # the same but for the page's number
    assert "of 5" not in document.text
    for before, after in pairwise(texts):
        assert f"{before.split()[-1]} {after.split()[0]}" in flat(document)
    for number, text in enumerate(texts, 1):
        assert [page_of(document, word) for word in text.split()] == [number] * 66
        assert page_of(document, f"the foot of page{number}x") == number


def test_a_word_broken_by_the_end_of_a_page_is_whole() -> None:
    pdf = sheet()
    for line in ("The goods are deli-", "vered in time."):
        page(pdf)
        put(pdf, 50, 100, line)
    document = read(pdf)
    assert document.text == "The goods are delivered in time."
    assert page_of(document, "vered") == 2


def test_a_line_that_opens_some_pages_is_no_running_head() -> None:
    pdf = sheet()
    for number in range(12):
        page(pdf)
        put(pdf, 50, 60, "Summary" if number % 4 == 0 else f"{prose(f'h{number}x', 4)}")
        put(pdf, 50, 100, f"{prose(f'b{number}x', 10)}")
    assert read(pdf).text.count("Summary") == 3


def test_a_number_that_does_not_count_the_pages_stays() -> None:
    pdf = sheet()
    for number in (31, 7, 19, 4):
        page(pdf)
        put(pdf, 50, 60, f"Total {number}")
        put(pdf, 50, 100, f"{prose(f'b{number}x', 10)}")
    text = read(pdf).text
    assert all(f"Total {number}" in text for number in (31, 7, 19, 4))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[(text, 10) for text in ("Invoice No. {}", "No. {}", "Item {}", "# {}", "§ {}", "Article {}", "{} Alpha Beta Ltd")],
        *[(text, 10) for text in ("2.{}", "{}/6/2024", "Step {} of 4", "Report for customer {}", "£ {}")],
        ("{}", 16),
        ("Chapter {}", 16),
        ("Page {}", 16),
    ],
)
@pytest.mark.parametrize("begun", [1, 20, 4711])
def test_a_number_that_goes_up_with_the_pages_stays_unless_it_is_surely_theirs(text: str, size: int, begun: int) -> None:
    lines = [text.format(begun + number) for number in range(4)]
    found = flat(read(counted(lines, size)))
    for number, line in enumerate(lines):
        (place,) = re.finditer(rf"(?<!\w){re.escape(line)}(?!\w)", found)
        assert place.start() < found.index(f"b{number}x9")


@pytest.mark.parametrize("begun", [1, 20])
@pytest.mark.parametrize("text", ["{}", "- {} -", "Page {}", "Page {} of 24", "{} / 24", "p. {}", "[{}]", "Seite {} von 24"])
def test_a_page_s_own_number_is_left_out(text: str, begun: int) -> None:
    document = read(counted([text.format(begun + number) for number in range(4)], 10))
    assert flat(document) == " ".join(f"{prose(f'b{number}x', 10)}." for number in range(4))


def test_a_number_far_from_the_page_s_stays_but_interrupts_no_sentence() -> None:
    pdf = counted([str(2019 + number) for number in range(4)], 10, end="")
    found = flat(read(pdf))
    assert all(found.count(str(year)) == 1 for year in range(2019, 2023))
    assert re.search(r"\w*b0x9 \w*b1x0\b", found)


def test_a_head_that_is_also_there_without_the_page_s_number_is_kept_once() -> None:
    heads = ["The Great Book"] * 3 + [f"{number} The Great Book" for number in range(4, 8)]
    found = flat(read(counted(heads, 10)))
    assert found.count("The Great Book") == 2
    assert "5 The Great Book" not in found


def counted(heads: Sequence[str], size: int, end: str = ".") -> FPDF:
    """Pages of ten words under these heads."""
    pdf = sheet()
    for number, head in enumerate(heads):
        page(pdf)
        put(pdf, 50, 60, head, size)
        put(pdf, 50, 100, f"{prose(f'b{number}x', 10)}{end}")
    return pdf


def test_headings_that_count_up_are_headings() -> None:
    heads = [f"Article {number}" for number in range(1, 5)]
    document = read(counted(heads, 10))
    assert [document.text[b.start : b.end] for b in document.blocks if b.kind == "heading"] == heads


def test_heads_of_left_and_right_pages_are_kept_once_each() -> None:
    pdf = sheet()
    for number in range(8):
        page(pdf)
        put(pdf, 50, 40, "Chapter 3, Delivery" if number % 2 else "The Great Book")
        put(pdf, 50, 100, f"{prose(f'b{number}x', 10)}.")
    text = read(pdf).text
    assert (text.count("Chapter 3, Delivery"), text.count("The Great Book")) == (1, 1)


def test_a_heading_written_last_is_read_where_it_stands() -> None:
    pdf = page(sheet())
    put(pdf, 50, 100, "The body of the text was written first.")
    put(pdf, 50, 60, "The Heading", size=16)
    assert read(pdf).text.startswith("The Heading")
