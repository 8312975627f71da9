"""PDF: pages, passwords, pictures without text."""

from __future__ import annotations

import io

import pypdf
import pytest
from fixtures_work import Work
from fpdf import FPDF

from ingest.isolate import ParserPool
from ingest.parsers import parse
from ingest.parsers.pdf import PdfParser
from storage.errors import FileError

BODY = "The supplier delivers the goods within thirty days of the order. "


def picture_page(pdf: FPDF) -> None:
    from PIL import Image

    pdf.add_page()
    pdf.image(Image.new("RGB", (40, 40), "red"), x=10, y=10)


def text_page(pdf: FPDF, heading: str, body: str, *, large: int = 18) -> None:
    pdf.add_page()
    pdf.set_font("helvetica", size=large)
    pdf.cell(0, 12, heading, new_x="LMARGIN", new_y="NEXT")
    pdf.set_font("helvetica", size=11)
    pdf.multi_cell(0, 6, body, new_x="LMARGIN", new_y="NEXT")


def written(pdf: FPDF) -> bytes:
    return bytes(pdf.output())


def encrypted(data: bytes, user: str, owner: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(data))
    writer.encrypt(user, owner, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


@pytest.fixture
def two_pages() -> bytes:
    pdf = FPDF()
    text_page(pdf, "Delivery Terms", BODY * 8)
    text_page(pdf, "Payment Terms", "The buyer pays within ten days. " * 8)
    return written(pdf)


def test_text_is_read_with_its_pages_and_headings(two_pages: bytes) -> None:
    document = parse(two_pages, "a.pdf")
    assert [a.page for a in document.anchors if a.headings] == [1, 2]
    kinds = [(b.kind, b.headings) for b in document.blocks]
    assert kinds == [
        ("heading", ("Delivery Terms",)), ("paragraph", ("Delivery Terms",)),
        ("heading", ("Payment Terms",)), ("paragraph", ("Payment Terms",)),
    ]  # fmt: skip
    second = document.text.index("The buyer pays")
    assert [a.page for a in document.anchors if a.start <= second][-1] == 2
    assert document.warnings == ()


def test_body_text_of_one_size_has_no_headings() -> None:
    pdf = FPDF()
    text_page(pdf, "Not a heading", BODY * 4, large=11)
    assert [b.kind for b in parse(written(pdf), "a.pdf").blocks] == ["paragraph"]


def test_a_numbered_clause_is_a_heading_in_any_size() -> None:
    pdf = FPDF()
    text_page(pdf, "4. Liability", BODY * 4, large=11)
    assert parse(written(pdf), "a.pdf").blocks[0].kind == "heading"


def test_a_user_password_is_asked_for(two_pages: bytes) -> None:
    with pytest.raises(FileError) as caught:
        parse(encrypted(two_pages, "user", "owner"), "a.pdf")
    assert caught.value.code == "password_required"


def test_an_owner_password_alone_does_not_keep_the_file_from_being_read(two_pages: bytes) -> None:
    assert parse(encrypted(two_pages, "", "owner"), "a.pdf").text == parse(two_pages, "a.pdf").text


def test_a_pdf_of_pictures_needs_ocr() -> None:
    pdf = FPDF()
    picture_page(pdf)
    picture_page(pdf)
    with pytest.raises(FileError) as caught:
        parse(written(pdf), "scan.pdf")
    assert caught.value.code == "ocr_required"


def test_a_mixed_pdf_is_read_and_names_the_page_without_text() -> None:
    pdf = FPDF()
    text_page(pdf, "One", BODY)
    picture_page(pdf)
    text_page(pdf, "Three", BODY)
    document = parse(written(pdf), "a.pdf")
    assert document.text.count("supplier") == 2
    assert len(document.warnings) == 1
    assert "Page 2" in document.warnings[0]
    assert [a.page for a in document.anchors if a.start <= document.text.index("Three")][-1] == 3


def test_a_job_says_what_a_file_that_was_read_could_not_give(work: Work) -> None:
    mixed, pictures = FPDF(), FPDF()
    text_page(mixed, "One", BODY)
    picture_page(mixed)
    picture_page(pictures)
    corpus = work.corpus()
    with ParserPool() as pool:
        work.parser = pool  # type: ignore[assignment]
        jobs = [work.ingest(corpus, {name: written(pdf)}) for name, pdf in (("mixed.pdf", mixed), ("scan.pdf", pictures))]
        work.compute_kv()
    first, second = map(work.view, jobs)
    assert (first["status"], first["errors"]) == ("completed", [])
    [warning] = first["warnings"]
    assert warning["filename"] == "mixed.pdf"
    assert "Page 2" in warning["message"]
    assert (second["status"], [error["code"] for error in second["errors"]]) == ("failed", ["ocr_required"])


def test_the_same_paragraph_on_two_pages_keeps_two_places() -> None:
    pdf = FPDF()
    for heading in ("One", "Two", "Three"):
        text_page(pdf, heading, BODY if heading != "Two" else "Something else.")
    document = parse(written(pdf), "a.pdf")
    places = [b.start for b in document.blocks if document.text[b.start : b.end].startswith("The supplier")]
    pages = [[a.page for a in document.anchors if a.start <= place][-1] for place in places]
    assert pages == [1, 3]


def test_empty_pages_have_no_text_and_no_warning() -> None:
    pdf = FPDF()
    pdf.add_page()
    with pytest.raises(FileError) as caught:
        parse(written(pdf), "a.pdf")
    assert caught.value.code == "no_text_extracted"


@pytest.mark.parametrize("data", [b"%PDF-1.4 and nothing more", b"%PDF-1.7\n" + b"\0\xff" * 500])
def test_a_damaged_pdf_is_invalid(data: bytes) -> None:
    with pytest.raises(FileError) as caught:
        parse(data, "a.pdf")
    assert caught.value.code == "invalid_file"


def test_a_hyphen_at_a_line_end_does_not_split_a_word() -> None:
    pdf = FPDF()
    pdf.add_page()
    pdf.set_font("helvetica", size=11)
    pdf.multi_cell(0, 6, "A hyphen-\nated word.")
    text = PdfParser().parse(written(pdf), "a.pdf").text
    assert "\x02" not in text
    assert "hyphenated" in text
