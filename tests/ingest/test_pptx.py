"""Presentations: slides in order, each its own section, shapes as they are read."""

from __future__ import annotations

import io
from typing import Any

import pptx
import pytest
from ingest_tokens import PlainTokenizer, check_cover
from lxml import etree
from office_kit import block_with, check_blocks, member, repacked, saved, texts
from PIL import Image
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.opc.package import Part
from pptx.opc.packuri import PackURI
from pptx.util import Inches

from ingest.chunker import cut
from ingest.parsers import parse
from storage.errors import FileError
from storage.types import ParsedDocument

TITLE_ONLY, BLANK = 5, 6


def deck() -> Any:
    return pptx.Presentation()


def add_slide(presentation: Any, title: str = "", *lines: str, notes: str = "") -> Any:
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    if title:
        slide.shapes.title.text = title
    slide.placeholders[1].text_frame.text = "\n".join(lines)
    if notes:
        slide.notes_slide.notes_text_frame.text = notes
    return slide


def add_box(shapes: Any, text: str, left: float, top: float) -> Any:
    box = shapes.add_textbox(Inches(left), Inches(top), Inches(2), Inches(0.5))
    box.text_frame.text = text
    return box


def picture(presentation: Any) -> None:
    slide = presentation.slides.add_slide(presentation.slide_layouts[BLANK])
    image = io.BytesIO()
    Image.new("RGB", (20, 20), "red").save(image, "PNG")
    image.seek(0)
    slide.shapes.add_picture(image, 0, 0)


def read(presentation: Any) -> ParsedDocument:
    document = parse(saved(presentation), "named.zip")
    check_blocks(document)
    return document


def test_slides_come_in_the_order_in_which_they_are_shown() -> None:
    presentation = deck()
    for name in ("One", "Two", "Three"):
        add_slide(presentation, name, f"Body {name}.")
    order = presentation.slides._sldIdLst
    order.insert(0, order[2])
    document = read(presentation)
    assert texts(document, "heading") == ["Three", "One", "Two"]
    assert block_with(document, "Body Two").headings == ("Two",)
    assert document.title == "Three"


def test_the_number_of_a_slide_is_the_page_of_its_chunks_and_none_reaches_over_two() -> None:
    presentation = deck()
    add_slide(presentation, "Same", "First.")
    add_slide(presentation, "Same", "Second.")
    add_slide(presentation, "", "Untitled one.")
    add_slide(presentation, "", "Untitled two.")
    add_slide(presentation, "Title alone")
    add_slide(presentation, "Title alone")
    add_slide(presentation, "Last", "Third.")
    document = read(presentation)
    chunks = cut(document, PlainTokenizer(), max_tokens=400)
    check_cover(document, chunks)
    assert [(c.text, c.page_start, c.page_end) for c in chunks] == [
        ("Same\n\nFirst.", 1, 1), ("Same\n\nSecond.", 2, 2), ("Untitled one.", 3, 3), ("Untitled two.", 4, 4),
        ("Title alone", 5, 5), ("Title alone", 6, 6), ("Last\n\nThird.", 7, 7),
    ]  # fmt: skip


def test_shapes_are_read_row_by_row_and_groups_stay_together() -> None:
    presentation = deck()
    slide = presentation.slides.add_slide(presentation.slide_layouts[TITLE_ONLY])
    slide.shapes.title.text = "Layout"
    add_box(slide.shapes, "bottom", 0.5, 6)
    add_box(slide.shapes, "right", 5, 2)
    add_box(slide.shapes, "left, a hair lower", 0.5, 2.05)
    group = slide.shapes.add_group_shape()
    add_box(group.shapes, "group below", 1, 4.5)
    add_box(group.shapes, "group above", 1, 4)
    inner = group.shapes.add_group_shape()
    add_box(inner.shapes, "group within", 1, 5)
    assert read(presentation).text.split("\n\n") == [
        "Layout", "left, a hair lower", "right", "group above", "group below", "group within", "bottom",
    ]  # fmt: skip


def test_levels_are_indented_and_breaks_in_a_line_are_blanks() -> None:
    presentation = deck()
    slide = add_slide(presentation, "T", "one", "two\vstill two")
    slide.placeholders[1].text_frame.paragraphs[1].level = 1
    assert texts(read(presentation), "list") == ["one\n  two still two"]


def test_a_table_keeps_its_header_and_merged_cells_are_read_once() -> None:
    presentation = deck()
    slide = presentation.slides.add_slide(presentation.slide_layouts[BLANK])
    table = slide.shapes.add_table(3, 3, 0, 0, Inches(4), Inches(2)).table
    for r in range(3):
        for c in range(3):
            table.cell(r, c).text = f"r{r}c{c}"
    table.cell(0, 1).merge(table.cell(0, 2))
    document = read(presentation)
    (block,) = document.blocks
    assert (block.kind, block.header) == ("table", "r0c0 | r0c1 r0c2")
    assert document.text.split("\n")[1:] == ["r1c0 | r1c1 | r1c2", "r2c0 | r2c1 | r2c2"]
    assert [document.text[at : at + 4] for at in block.breaks] == ["r2c0"]


def test_notes_and_hidden_slides_are_marked() -> None:
    presentation = deck()
    add_slide(presentation, "Shown", "Body.", notes="Say this aloud.")
    add_slide(presentation, "Backup", "Figures.")._element.set("show", "0")
    assert read(presentation).text.split("\n\n") == [
        "Shown", "Body.", "Notes: Say this aloud.", "Backup", "[Hidden slide]", "Figures.",
    ]  # fmt: skip


def test_a_charts_figures_are_a_table() -> None:
    presentation = deck()
    slide = presentation.slides.add_slide(presentation.slide_layouts[BLANK])
    data = CategoryChartData()
    data.categories = ["2023", "2024"]
    data.add_series("Revenue", (1.5, 2))
    data.add_series("Costs", (1, None))
    chart = slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, Inches(4), Inches(3), data).chart
    chart.has_title = True
    chart.chart_title.text_frame.text = "Growth"
    assert read(presentation).text.split("\n\n") == ["Growth", " | Revenue | Costs\n2023 | 1.5 | 1\n2024 | 2"]


def test_a_diagram_and_a_shape_in_two_versions_are_read() -> None:
    presentation = deck()
    slide = add_slide(presentation, "T", "Body.")
    space = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
    blob = f"<d {space}><a:p><a:r><a:t>Step one</a:t></a:r></a:p></d>".encode()
    part = Part(PackURI("/ppt/diagrams/data1.xml"), "application/xml", presentation.part.package, blob)
    identity = slide.part.relate_to(part, "http://schemas.openxmlformats.org/officeDocument/2006/relationships/diagramData")
    frame = slide.shapes.add_table(1, 1, 0, 0, 1, 1)._element
    data = frame.find(".//{http://schemas.openxmlformats.org/drawingml/2006/main}graphicData")
    data.set("uri", "http://schemas.openxmlformats.org/drawingml/2006/diagram")
    data[:] = [
        etree.fromstring(
            '<d:relIds xmlns:d="http://schemas.openxmlformats.org/drawingml/2006/diagram" xmlns:r='
            f'"http://schemas.openxmlformats.org/officeDocument/2006/relationships" r:dm="{identity}"/>'
        )
    ]
    slide.shapes._spTree.append(
        etree.fromstring(
            '<m:AlternateContent xmlns:m="http://schemas.openxmlformats.org/markup-compatibility/2006">'
            f"<m:Choice Requires='x'><s><a:p {space}><a:r><a:t>Newer</a:t></a:r></a:p></s></m:Choice>"
            f"<m:Fallback><s><a:p {space}><a:r><a:t>Older</a:t></a:r></a:p></s></m:Fallback></m:AlternateContent>"
        )
    )
    found = read(presentation).text
    assert sorted(found.split("\n\n")) == ["Body.", "Newer", "Step one", "T"]


def test_footers_stand_once_and_numbers_and_dates_not_at_all() -> None:
    presentation = deck()
    for number in (1, 2):
        slide = add_slide(presentation, f"T{number}", f"Body {number}.")
        for holder in slide.slide_layout.placeholders:
            if holder.placeholder_format.idx in (10, 11, 12):
                slide.shapes._spTree.append(etree.fromstring(etree.tostring(holder._element)))
                added = slide.shapes[-1]
                added.text_frame.text = {10: "1 May", 11: "ACME internal", 12: "7"}[holder.placeholder_format.idx]
    found = read(presentation).text
    assert found.count("ACME internal") == 1
    assert "1 May" not in found
    assert "7" not in found


def test_a_show_and_a_template_are_read_like_a_presentation() -> None:
    presentation = deck()
    add_slide(presentation, "T", "Body.")
    data = saved(presentation)
    types = member(data, "[Content_Types].xml")
    for kind in (b"slideshow", b"template"):
        other = repacked(data, {"[Content_Types].xml": types.replace(b"presentation.main", kind + b".main")})
        assert parse(other, "x").text == "T\n\nBody."


def test_slides_of_pictures_only_are_named_or_ask_for_ocr() -> None:
    presentation = deck()
    picture(presentation)
    with pytest.raises(FileError) as caught:
        read(presentation)
    assert caught.value.code == "ocr_required"
    add_slide(presentation, "T", "Body.")
    assert read(presentation).warnings == ("Slide 1 has no text, only a picture; it was not read.",)


def test_a_deck_without_anything_has_no_text() -> None:
    presentation = deck()
    presentation.slides.add_slide(presentation.slide_layouts[BLANK])
    with pytest.raises(FileError) as caught:
        read(presentation)
    assert caught.value.code == "no_text_extracted"


def test_a_shape_without_a_place_is_read() -> None:
    presentation = deck()
    slide = presentation.slides.add_slide(presentation.slide_layouts[BLANK])
    box = add_box(slide.shapes, "Somewhere.", 1, 1)
    box._element.spPr.remove(box._element.spPr.find("{http://schemas.openxmlformats.org/drawingml/2006/main}xfrm"))
    assert slide.shapes[0].top is None
    assert read(presentation).text == "Somewhere."
