"""Word documents: what a reader of the page sees is what the text holds."""

from __future__ import annotations

from typing import Any

import docx
import pytest
from docx.enum.style import WD_STYLE_TYPE
from office_kit import (
    add_part,
    add_xml,
    block_with,
    check_blocks,
    element,
    member,
    paragraph,
    repacked,
    saved,
    set_numbering,
    texts,
    word,
)

from ingest.parsers import parse
from ingest.parsers.docx_numbering import shown_number
from storage.types import ParsedDocument

# A contract's lists: headings by style, (a) below them, and bullets.
LEGAL = (
    """<w:abstractNum w:abstractNumId="7">
    <w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:pStyle w:val="Heading1"/>
    <w:lvlText w:val="%1."/></w:lvl>
    <w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:pStyle w:val="Heading2"/>
    <w:lvlText w:val="%1.%2"/></w:lvl>
    <w:lvl w:ilvl="2"><w:start w:val="1"/><w:numFmt w:val="lowerLetter"/><w:lvlText w:val="(%3)"/></w:lvl>
    <w:lvl w:ilvl="3"><w:start w:val="1"/><w:numFmt w:val="upperRoman"/><w:isLgl/><w:lvlText w:val="%1.%2.%3.%4"/></w:lvl>
    </w:abstractNum>""",
    """<w:abstractNum w:abstractNumId="8">
    <w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/><w:lvlText w:val=""/></w:lvl>
    <w:lvl w:ilvl="1"><w:numFmt w:val="bullet"/><w:lvlText w:val="o"/></w:lvl></w:abstractNum>""",
    """<w:abstractNum w:abstractNumId="9"><w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="chineseCountingThousand"/>
    <w:lvlText w:val="第%1条"/></w:lvl></w:abstractNum>""",
    '<w:num w:numId="1"><w:abstractNumId w:val="7"/></w:num>',
    '<w:num w:numId="2"><w:abstractNumId w:val="8"/></w:num>',
    '<w:num w:numId="3"><w:abstractNumId w:val="9"/></w:num>',
    """<w:num w:numId="4"><w:abstractNumId w:val="7"/>
    <w:lvlOverride w:ilvl="2"><w:startOverride w:val="1"/></w:lvlOverride></w:num>""",
)


def counted(num: int, level: int, style: str = "") -> str:
    named = f'<w:pStyle w:val="{style}"/>' if style else ""
    return f'{named}<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{num}"/></w:numPr>'


def legal(document: Any) -> None:
    """Lists as above; the heading styles count in the first by themselves."""
    set_numbering(document, *LEGAL)
    for name in ("Heading 1", "Heading 2"):
        properties = document.styles[name].element.get_or_add_pPr()
        properties.append(element('<w:numPr><w:numId w:val="1"/></w:numPr>'))


def read(data: bytes) -> ParsedDocument:
    document = parse(data, "without a suffix")
    check_blocks(document)
    return document


def lines(*pieces: str) -> list[str]:
    return [line for line in read(word(*pieces)).text.split("\n") if line]


# --- numbers ---


def test_numbers_that_live_in_styles_stand_before_their_text() -> None:
    document = read(
        word(
            paragraph("Definitions", '<w:pStyle w:val="Heading1"/>'),
            paragraph("Terms", '<w:pStyle w:val="Heading2"/>'),
            paragraph("Fees", '<w:pStyle w:val="Heading2"/>'),
            paragraph("The fee is due.", counted(1, 2)),
            paragraph("The cap is ten.", counted(1, 2)),
            paragraph("Deep.", counted(1, 3)),
            paragraph("Liability", '<w:pStyle w:val="Heading1"/>'),
            paragraph("Caps", '<w:pStyle w:val="Heading2"/>'),
            paragraph("Again from the top.", counted(1, 2)),
            change=legal,
        )
    )
    assert document.text.split("\n\n") == [
        "1. Definitions", "1.1 Terms", "1.2 Fees", "(a) The fee is due.\n(b) The cap is ten.\n  1.2.2.1 Deep.",
        "2. Liability", "2.1 Caps", "(a) Again from the top.",
    ]  # fmt: skip
    assert block_with(document, "The cap").headings == ("1. Definitions", "1.2 Fees")
    assert block_with(document, "Again").headings == ("2. Liability", "2.1 Caps")


def test_a_list_that_starts_anew_starts_anew_once() -> None:
    found = read(
        word(
            paragraph("One.", counted(1, 2)),
            paragraph("Two.", counted(1, 2)),
            paragraph("One again.", counted(4, 2)),
            paragraph("Two again.", counted(4, 2)),
            change=legal,
        )
    ).text
    assert found == "(a) One.\n(b) Two.\n(a) One again.\n(b) Two again."


def test_bullets_are_indented_by_their_level_and_a_zero_list_is_none() -> None:
    found = read(
        word(
            paragraph("one", counted(2, 0)),
            paragraph("two", counted(2, 1)),
            paragraph("plain", counted(0, 0, "ListBullet")),
            change=legal,
        )
    )
    assert found.text == "- one\n  - two\n\nplain"
    assert texts(found, "list") == ["- one\n  - two"]


def test_chinese_articles_are_numbered_in_chinese() -> None:
    items = [paragraph(f"Clause {n}.", counted(3, 0)) for n in range(1, 13)]
    found = read(word(*items, change=legal)).text.split("\n")
    assert [found[n].split()[0] for n in (0, 9, 10, 11)] == ["第一条", "第十条", "第十一条", "第十二条"]


def test_a_deleted_paragraph_is_not_counted_and_an_empty_one_is() -> None:
    gone = (
        '<w:p><w:pPr>{}<w:rPr><w:del w:id="1"/></w:rPr></w:pPr><w:del w:id="2"><w:r><w:delText>x</w:delText></w:r></w:del></w:p>'
    )
    found = read(
        word(
            paragraph("One.", counted(1, 2)),
            gone.format(counted(1, 2)),
            paragraph("Two.", counted(1, 2)),
            paragraph("", counted(1, 2)),
            paragraph("Four.", counted(1, 2)),
            change=legal,
        )
    ).text
    assert found == "(a) One.\n(b) Two.\n(d) Four."


@pytest.mark.parametrize(
    ("number", "form", "shown"),
    [
        (4, "lowerRoman", "iv"), (1999, "upperRoman", "MCMXCIX"), (27, "lowerLetter", "aa"), (52, "upperLetter", "ZZ"),
        (7, "decimalZero", "07"), (12, "ordinal", "12th"), (22, "ordinal", "22nd"), (105, "chineseCounting", "一百零五"),
        (110, "chineseCounting", "一百一十"), (20, "japaneseCounting", "二十"), (3, "none", ""), (5, "unheardOf", "5"),
        (0, "upperRoman", "0"), (0, "lowerLetter", "0"),
    ],
)  # fmt: skip
def test_numbers_in_the_forms_of_word(number: int, form: str, shown: str) -> None:
    assert shown_number(number, form) == shown


# --- headings ---


def test_headings_come_from_inherited_and_local_styles() -> None:
    document = docx.Document()
    own = document.styles.add_style("Kapitel", WD_STYLE_TYPE.PARAGRAPH)
    own.base_style = document.styles["Heading 1"]
    level = document.styles.add_style("Unterkapitel", WD_STYLE_TYPE.PARAGRAPH)
    level.element.get_or_add_pPr().append(element('<w:outlineLvl w:val="1"/>'))
    body = document.styles.add_style("Kein Kapitel", WD_STYLE_TYPE.PARAGRAPH)
    body.base_style = own
    body.element.get_or_add_pPr().append(element('<w:outlineLvl w:val="9"/>'))
    document.add_paragraph("Haftung", style="Kapitel")
    document.add_paragraph("Grenzen", style="Unterkapitel")
    document.add_paragraph("Kein Titel", style="Kein Kapitel")
    add_xml(document, paragraph("Direct", '<w:outlineLvl w:val="2"/>'), paragraph("Text."))
    found = read(saved(document))
    assert texts(found, "heading") == ["Haftung", "Grenzen", "Direct"]
    assert block_with(found, "Text.").headings == ("Haftung", "Grenzen", "Direct")
    assert found.title == "Haftung"


def test_styles_based_on_each_other_in_a_ring_are_no_loop() -> None:
    document = docx.Document()
    first, second = (document.styles.add_style(name, WD_STYLE_TYPE.PARAGRAPH) for name in ("A", "B"))
    first.base_style, second.base_style = second, first
    document.add_paragraph("Text.", style="A")
    assert read(saved(document)).text == "Text."


def test_without_styles_numbered_headings_are_told_by_their_looks() -> None:
    pieces = ["SUPPLY AGREEMENT", "1. Definitions", "The words below are used.", "2. Term", "It is a year.",
              "To buy:", "1. Milk", "2. Eggs", "3. Bread", "Section 4.2 shall apply to all claims."]  # fmt: skip
    found = read(word(*(paragraph(text) for text in pieces)))
    assert texts(found, "heading") == ["1. Definitions", "2. Term"]
    assert block_with(found, "It is a year").headings == ("2. Term",)


# --- changes ---


def test_what_was_deleted_is_gone_and_what_was_inserted_is_there() -> None:
    assert lines(
        '<w:p><w:r><w:t xml:space="preserve">The limit is </w:t></w:r>'
        '<w:del w:id="1"><w:r><w:delText>10</w:delText></w:r></w:del>'
        '<w:ins w:id="2"><w:r><w:t>20</w:t></w:r></w:ins><w:r><w:t xml:space="preserve"> days.</w:t></w:r></w:p>',
        '<w:p><w:moveFrom w:id="3"><w:r><w:t>Was here.</w:t></w:r></w:moveFrom>'
        '<w:moveTo w:id="4"><w:r><w:t>Is here.</w:t></w:r></w:moveTo></w:p>',
    ) == ["The limit is 20 days.", "Is here."]


def test_paragraphs_joined_by_a_deleted_end_are_one() -> None:
    assert lines(
        '<w:p><w:pPr><w:rPr><w:del w:id="1"/></w:rPr></w:pPr><w:r><w:t xml:space="preserve">First half </w:t></w:r></w:p>',
        paragraph("second half."),
    ) == ["First half second half."]
    last = '<w:p><w:pPr><w:rPr><w:del w:id="1"/></w:rPr></w:pPr><w:r><w:t>Never ended.</w:t></w:r></w:p>'
    assert lines(last) == ["Never ended."]


def test_comments_and_hidden_text_are_left_out() -> None:
    document = docx.Document()
    seen = document.add_paragraph("Seen.")
    document.add_comment(seen.runs, text="Between us: too cheap.", author="A", initials="A")
    seen.add_run(" Hidden.").font.hidden = True
    assert read(saved(document)).text == "Seen."


# --- what hangs on a paragraph ---


def notes(document: Any) -> None:
    for kind, name, text in (("footnotes", "footnote", "Under the line."), ("endnotes", "endnote", "At the end.")):
        add_part(
            document, kind,
            f'<w:{kind}><w:{name} w:id="-1" w:type="separator"><w:p/></w:{name}>'
            f'<w:{name} w:id="5"><w:p><w:r><w:{name}Ref/></w:r><w:r><w:t>{text}</w:t></w:r></w:p></w:{name}></w:{kind}>',
        )  # fmt: skip


def test_notes_stand_after_the_paragraph_that_refers_to_them() -> None:
    refer = '<w:p><w:r><w:t>{}</w:t></w:r><w:r><w:{}Reference w:id="5"/></w:r></w:p>'
    found = read(word(refer.format("Claim", "footnote"), refer.format("Proof", "endnote"), paragraph("End."), change=notes))
    assert found.text.split("\n\n") == [
        "Claim[^1]", "[^1]: Under the line.", "Proof[^e1]", "[^e1]: At the end.", "End.",
    ]  # fmt: skip


def test_a_note_in_a_table_and_one_cited_twice_stand_once() -> None:
    cell = '<w:tc><w:p><w:r><w:t>{}</w:t><w:footnoteReference w:id="5"/></w:r></w:p></w:tc>'
    table = f"<w:tbl><w:tr>{cell.format('a')}{cell.format('b')}</w:tr></w:tbl>"
    found = read(word(table, change=notes)).text
    assert found == "a[^1] | b[^1]\n\n[^1]: Under the line."


def test_a_text_box_is_read_once_and_after_its_paragraph() -> None:
    box = "<w:txbxContent><w:p><w:r><w:t>{}</w:t></w:r></w:p></w:txbxContent>"
    found = lines(
        "<w:p><w:r><w:t>Beside it.</w:t></w:r><w:r><mc:AlternateContent>"
        f'<mc:Choice Requires="wps"><w:drawing><wps:txbx>{box.format("In a box.")}</wps:txbx></w:drawing></mc:Choice>'
        f"<mc:Fallback><w:pict><v:textbox>{box.format('In a box.')}</v:textbox></w:pict></mc:Fallback>"
        "</mc:AlternateContent></w:r></w:p>",
        f"<w:p><w:r><w:pict><v:textbox>{box.format('An old box.')}</v:textbox></w:pict></w:r></w:p>",
    )
    assert found == ["Beside it.", "In a box.", "An old box."]


def test_content_controls_links_and_smart_tags_are_seen_through() -> None:
    run = "<w:r><w:t>{}</w:t></w:r>"
    assert lines(
        f"<w:sdt><w:sdtPr/><w:sdtContent>{paragraph('A control.')}"
        f"<w:sdt><w:sdtContent>{paragraph('One in another.')}</w:sdtContent></w:sdt></w:sdtContent></w:sdt>",
        f"<w:p><w:sdt><w:sdtContent>{run.format('Inline,')}</w:sdtContent></w:sdt>"
        f'<w:hyperlink r:id="x">{run.format("linked,")}</w:hyperlink>'
        f"<w:smartTag>{run.format('tagged.')}</w:smartTag></w:p>",
    ) == ["A control.", "One in another.", "Inline,linked,tagged."]


def field(code: str, result: str) -> str:
    return (
        f'<w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText>{code}</w:instrText></w:r>'
        f'<w:r><w:fldChar w:fldCharType="separate"/></w:r><w:r><w:t>{result}</w:t></w:r>'
        '<w:r><w:fldChar w:fldCharType="end"/></w:r>'
    )


def test_fields_show_their_results_and_not_their_codes() -> None:
    nested = field("REF b", "2").replace("REF b", f"</w:instrText></w:r>{field('X', 'hidden')}<w:r><w:instrText>")
    assert lines(
        f"<w:p>{field('REF a', 'See 3.1')}</w:p>",
        f"<w:p>{nested}</w:p>",
        '<w:p><w:fldSimple w:instr="AUTHOR"><w:r><w:t>Jane</w:t></w:r></w:fldSimple></w:p>',
        '<w:p><w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:t>code</w:t></w:r></w:p>',
        paragraph("After a field that never ends."),
    ) == ["See 3.1", "2", "Jane", "After a field that never ends."]


def test_breaks_tabs_hyphens_and_ticks() -> None:
    assert lines(
        "<w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>co\xadope</w:t><w:softHyphen/><w:t>ration</w:t>"
        '<w:noBreakHyphen/><w:t>x</w:t><w:sym w:font="Wingdings" w:char="F0FE"/></w:r></w:p>'
    ) == ["a\tb", "cooperation-x☒"]


# --- tables ---


def grid(document: Any, rows: int, columns: int) -> Any:
    table = document.add_table(rows, columns)
    for r in range(rows):
        for c in range(columns):
            table.cell(r, c).text = f"r{r}c{c}"
    return table


def test_a_table_stands_in_its_place_with_its_header() -> None:
    document = docx.Document()
    document.add_paragraph("Before.")
    grid(document, 3, 2)
    document.add_paragraph("After.")
    found = read(saved(document))
    assert found.text.split("\n\n") == ["Before.", "r0c0 | r0c1\nr1c0 | r1c1\nr2c0 | r2c1", "After."]
    table = block_with(found, "r0c0")
    assert (table.kind, table.header) == ("table", "r0c0 | r0c1")
    assert [found.text[at : at + 4] for at in table.breaks] == ["r2c0"]


def test_merged_cells_are_read_once_and_columns_stay_in_line() -> None:
    document = docx.Document()
    table = grid(document, 3, 3)
    table.cell(0, 1).merge(table.cell(0, 2)).text = "wide"
    table.cell(1, 0).merge(table.cell(2, 0)).text = "tall"
    assert read(saved(document)).text == "r0c0 | wide\ntall | r1c1 | r1c2\n | r2c1 | r2c2"


def test_what_a_merged_away_cell_still_holds_is_not_read() -> None:
    cell = "<w:tc><w:tcPr>{}</w:tcPr>" + paragraph("{}") + "</w:tc>"
    rows = [
        cell.format('<w:vMerge w:val="restart"/>', "tall") + cell.format("", "a"),
        cell.format("<w:vMerge/>", "stale") + cell.format('<w:gridSpan w:val="1"/>', "b"),
    ]
    table = "<w:tbl>" + "".join(f"<w:tr>{row}</w:tr>" for row in rows) + "</w:tbl>"
    assert read(word(table)).text == "tall | a\n | b"


def test_rows_marked_as_header_are_the_header_and_deleted_rows_are_gone() -> None:
    document = docx.Document()
    table = grid(document, 5, 2)
    for row in table.rows[:2]:
        row._tr.get_or_add_trPr().append(element("<w:tblHeader/>"))
    table.rows[3]._tr.get_or_add_trPr().append(element('<w:del w:id="1"/>'))
    found = read(saved(document))
    assert block_with(found, "r0c0").header == "r0c0 | r0c1\nr1c0 | r1c1"
    assert "r3c0" not in found.text
    assert "r4c0" in found.text


def test_a_table_that_only_places_text_is_read_as_text() -> None:
    document = docx.Document()
    outer = document.add_table(1, 2)
    outer.cell(0, 0).text = "Left column."
    inner = outer.cell(0, 1).add_table(2, 2)
    inner.cell(0, 0).text, inner.cell(1, 1).text = "inner", "cell"
    assert read(saved(document)).text.split("\n\n") == ["Left column.", "inner\n | cell"]


def test_a_long_cell_of_lists_keeps_its_numbers() -> None:
    cell = "".join(paragraph(text, counted(1, 2)) for text in ("one", "two"))
    row = f"<w:tr><w:tc>{cell}</w:tc><w:tc>{paragraph('x')}</w:tc></w:tr>"
    assert read(word(f"<w:tbl>{row}</w:tbl>", change=legal)).text == "(a) one (b) two | x"


# --- around the page ---


def test_headers_and_footers_stand_once_and_by_themselves() -> None:
    document = docx.Document()
    document.add_paragraph("Body.")
    document.sections[0].header.paragraphs[0].text = "Confidential"
    document.sections[0].footer.paragraphs[0].text = "- 3 -"
    section = document.add_section()
    section.header.is_linked_to_previous = section.footer.is_linked_to_previous = False
    section.header.paragraphs[0].text = "Confidential"
    section.footer.paragraphs[0].text = "Contract 17"
    document.add_paragraph("More.")
    found = read(saved(document))
    assert found.text.split("\n\n") == ["Body.", "More.", "Confidential", "Contract 17"]
    assert block_with(found, "Confidential").headings == ("Header and footer",)


def test_a_strict_document_reads_like_a_transitional_one() -> None:
    data = word(paragraph("Text.", '<w:pStyle w:val="Heading1"/>'), paragraph("Body."))
    strict = {
        name: member(data, name)
        .replace(b"schemas.openxmlformats.org/wordprocessingml/2006/main", b"purl.oclc.org/ooxml/wordprocessingml/main")
        .replace(b"schemas.openxmlformats.org/officeDocument/2006/", b"purl.oclc.org/ooxml/officeDocument/")
        for name in ("word/document.xml", "word/styles.xml", "word/_rels/document.xml.rels", "_rels/.rels")
    }
    assert strict["word/document.xml"] != member(data, "word/document.xml")
    assert read(repacked(data, strict)) == read(data)


def test_a_main_part_of_another_name_is_found() -> None:
    data = word(paragraph("Text."))
    renamed = {
        "word/document.xml": None,
        "word/document2.xml": member(data, "word/document.xml"),
        "word/_rels/document.xml.rels": None,
        "word/_rels/document2.xml.rels": member(data, "word/_rels/document.xml.rels"),
        "_rels/.rels": member(data, "_rels/.rels").replace(b"document.xml", b"document2.xml"),
    }
    assert read(repacked(data, renamed)).text == "Text."
