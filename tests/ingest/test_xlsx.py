"""Workbooks: sheets as sections, values as they are shown, and caps that the text tells of."""

from __future__ import annotations

import datetime
import tracemalloc
from typing import Any

import openpyxl
import pytest
from ingest_tokens import PlainTokenizer, check_cover
from office_kit import block_with, check_blocks, member, repacked, saved, texts
from openpyxl.styles import numbers

from ingest.chunker import cut
from ingest.parsers import parse
from ingest.parsers.xlsx import XlsxParser
from storage.types import ParsedDocument


def book(*rows: Any, name: str = "Data") -> Any:
    made = openpyxl.Workbook()
    made.active.title = name
    for row in rows:
        made.active.append(row)
    return made


def read(made: Any) -> ParsedDocument:
    document = parse(saved(made), "named.csv")
    check_blocks(document)
    return document


def test_values_are_typed_as_a_reader_sees_them() -> None:
    when = datetime.datetime(2024, 2, 29, 13, 30)
    made = book(
        ["date", "time", "moment", "whole", "sum", "flag", "share", "big", "text"],
        [datetime.date(2024, 2, 29), datetime.time(9, 5), when, 3.0, 0.1 + 0.2, True, 0.125, 123456789012, " a\n b "],
    )
    made.active["G2"].number_format = numbers.FORMAT_PERCENTAGE_00
    assert read(made).text.split("\n")[-1] == (
        "2024-02-29 | 09:05:00 | 2024-02-29 13:30:00 | 3 | 0.3 | TRUE | 12.5% | 123456789012 | a b"
    )


def test_noise_of_binary_fractions_is_not_shown() -> None:
    data = saved(book(["sum"], [7.25]))
    sheet = member(data, "xl/worksheets/sheet1.xml").replace(b"7.25", b"0.30000000000000004")
    assert parse(repacked(data, {"xl/worksheets/sheet1.xml": sheet}), "x").text == "Data\n\nsum\n0.3"


def test_each_sheet_is_a_section_and_hidden_ones_are_marked() -> None:
    made = book(["a", "b"], [1, 2], name="First")
    second = made.create_sheet("Second")
    second.append(["c", "d"])
    second.append([3, 4])
    second.sheet_state = "hidden"
    made.create_sheet("Empty")
    document = read(made)
    assert document.text.split("\n\n") == ["First", "a | b\n1 | 2", "Second", "[Hidden sheet]", "c | d\n3 | 4"]
    assert block_with(document, "3 | 4").headings == ("Second",)


def test_a_sixty_row_table_is_cut_between_rows_and_keeps_its_header() -> None:
    document = read(book(["item", "price"], *([f"thing {n}", n * 7] for n in range(60))))
    table = block_with(document, "thing 7 ")
    assert table.header == "item | price"
    chunks = cut(document, PlainTokenizer(), max_tokens=120)
    check_cover(document, chunks)
    assert len(chunks) >= 3
    rows = set(document.text.split("\n"))
    assert all(line in rows for chunk in chunks for line in chunk.text.split("\n"))


def test_empty_rows_and_columns_are_trimmed_and_part_tables() -> None:
    made = openpyxl.Workbook()
    sheet = made.active
    sheet["C3"], sheet["E3"], sheet["C4"], sheet["E4"] = "name", "age", "Ann", 7
    sheet["C9"], sheet["E9"], sheet["C10"], sheet["E10"] = "city", "size", "Rome", 8
    sheet["C12"], sheet["E12"] = "Bonn", 9
    document = read(made)
    assert texts(document, "table") == ["name | age\nAnn | 7", "city | size\nRome | 8", "Bonn | 9"]
    assert [b.header for b in document.blocks if b.kind == "table"] == ["name | age", "city | size", "city | size"]


def test_lines_above_a_table_are_no_header() -> None:
    document = read(book(["Report of 2024"], ["drawn up in May"], ["name", "age"], ["Ann", 7]))
    assert texts(document, "list") == ["Report of 2024\ndrawn up in May"]
    assert block_with(document, "Ann").header == "name | age"


def test_a_merged_cell_is_read_once() -> None:
    made = book(["wide", None, "c"], [1, 2, 3])
    made.active.merge_cells("A1:B1")
    assert texts(read(made), "table") == ["wide |  | c\n1 | 2 | 3"]


def test_formulas_give_their_stored_result_and_themselves_where_there_is_none() -> None:
    made = book(["a", "b", "sum"], [1, 2, "=A2+B2"], [3, 4, "=A3+B3"])
    assert texts(read(made), "table") == ["a | b | sum\n1 | 2 | =A2+B2\n3 | 4 | =A3+B3"]
    data = saved(made)
    sheet = member(data, "xl/worksheets/sheet1.xml")
    stored = sheet.replace(b"<f>A2+B2</f><v />", b"<f>A2+B2</f><v>3</v>").replace(b"<f>A2+B2</f><v></v>", b"<f>A2+B2</f><v>3</v>")
    assert stored != sheet
    assert texts(parse(repacked(data, {"xl/worksheets/sheet1.xml": stored}), "x"), "table") == [
        "a | b | sum\n1 | 2 | 3\n3 | 4 | =A3+B3"
    ]


def test_a_cap_cuts_with_a_visible_mark_and_the_next_sheets_say_so_too() -> None:
    made = book(["a", "b"], *([n, n] for n in range(50)), name="Long")
    made.create_sheet("Next").append(["x", "y"])
    document = XlsxParser(cells=40).parse(saved(made), "x")
    mark = "Sheet {!r} was cut here: the workbook has more than the 40 cells that are read."
    assert document.text.split("\n\n")[2:] == [f"[{mark.format('Long')}]", "Next", f"[{mark.format('Next')}]"]
    assert document.warnings == (mark.format("Long"), mark.format("Next"))
    assert "18 | 18" in document.text
    assert "19 | 19" not in document.text
    assert XlsxParser(cells=104).parse(saved(made), "x").warnings == ()


@pytest.mark.parametrize("limits", [{"places": 2_000}, {"characters": 100}])
def test_gaps_and_long_texts_are_capped_as_well(limits: dict[str, int]) -> None:
    made = openpyxl.Workbook()
    made.active["A1"], made.active["B1"] = "first", "second"
    made.active["XFD3"] = "x" * 101
    document = XlsxParser(**limits).parse(saved(made), "x")
    assert "first | second" in document.text
    assert "was cut here" in document.text
    assert "xxx" not in document.text


@pytest.mark.slow
def test_a_sheet_that_states_a_wrong_size_is_read_whole_and_a_far_cell_costs_little() -> None:
    made = book(["a", "b"], [1, 2])
    made.active["A1048576"] = "last"
    data = saved(made)
    sheet = member(data, "xl/worksheets/sheet1.xml").replace(b"A1:B1048576", b"A1:A1")
    tracemalloc.start()
    try:
        document = parse(repacked(data, {"xl/worksheets/sheet1.xml": sheet}), "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert document.text == "Data\n\na | b\n1 | 2\n\nlast"
    assert peak < 30 << 20
