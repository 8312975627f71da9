"""Office files that are damaged, protected, or made to hurt who opens them."""

from __future__ import annotations

import io
import random
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator

import docx
import openpyxl
import pptx
import pytest
from office_kit import member, repacked, saved

from ingest.archive import Caps, is_archive
from ingest.detect import detect, is_binary
from ingest.isolate import ParserPool
from ingest.parsers import PARSERS, parse
from ingest.parsers.package import inspect
from storage.errors import FileError

SECRET = "the words of the file"
MAIN = {"docx": "word/document.xml", "pptx": "ppt/slides/slide1.xml", "xlsx": "xl/worksheets/sheet1.xml"}
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"


def make_docx() -> bytes:
    document = docx.Document()
    document.add_paragraph(SECRET)
    document.add_table(2, 2).cell(0, 0).text = "cell"
    return saved(document)


def make_pptx() -> bytes:
    presentation = pptx.Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text = SECRET
    return saved(presentation)


def make_xlsx() -> bytes:
    book = openpyxl.Workbook()
    book.active.append([SECRET, "b"])
    book.active.append(["x", 1.5])
    return saved(book)


FILES = {"docx": make_docx(), "pptx": make_pptx(), "xlsx": make_xlsx()}
KINDS = sorted(FILES)


@pytest.fixture(scope="module")
def pool() -> Iterator[ParserPool]:
    with ParserPool(memory_bytes=1 << 30) as made:
        yield made


def code_of(data: bytes, read: Callable[[bytes, str], object] = parse) -> str:
    with pytest.raises(FileError) as caught:
        read(data, "any.name")
    return caught.value.code


def peak_of(data: bytes) -> tuple[str, int]:
    tracemalloc.start()
    try:
        return code_of(data), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- what it is ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.zip", "a.txt", "a", "a.docx"])
def test_content_says_what_it_is_and_the_name_does_not(kind: str, name: str) -> None:
    assert detect(FILES[kind], name) == kind
    assert SECRET in parse(FILES[kind], name).text
    assert not is_archive(FILES[kind])
    assert not is_binary(FILES[kind])
    assert not is_binary(FILES[kind][:8192])


def test_an_archive_that_is_called_a_document_is_no_document() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.docx", FILES["docx"])  # stored: its names are in the bytes, but not in the directory
    assert is_archive(out.getvalue())
    assert is_binary(out.getvalue())
    assert code_of(out.getvalue()) == "unsupported_file"


def test_a_long_file_is_told_by_its_ends() -> None:
    noise = random.Random(1).randbytes(6 << 20)
    document = io.BytesIO(repacked(FILES["xlsx"], {"xl/media/image1.png": noise}))
    assert not is_archive(document)
    assert document.tell() == 0
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.docx", FILES["docx"])
        archive.writestr("noise", noise)
    out.seek(0)
    assert is_archive(out)


def ole(*names: str) -> bytes:
    return OLE + bytes(504) + b"".join(name.encode("utf-16-le").ljust(128, b"\0") for name in names)


def test_a_protected_office_file_asks_for_its_password() -> None:
    assert code_of(ole("Root Entry", "EncryptionInfo", "EncryptedPackage")) == "password_required"


@pytest.mark.parametrize(
    ("stream", "words"),
    [("WordDocument", ".docx"), ("Workbook", ".xlsx"), ("PowerPoint Document", ".pptx"), ("__substg1.0_001A001F", ".eml")],
)
def test_files_of_old_programs_say_what_to_save_them_as(stream: str, words: str) -> None:
    data = ole("Root Entry", stream, "Workbook")
    with pytest.raises(FileError, match=words) as caught:
        parse(data, "report.docx")
    assert caught.value.code == "unsupported_file"
    assert "\n" not in str(caught.value)
    assert not is_binary(data)  # a source offers it, so that the job names it with its code


def test_other_containers_stay_binary() -> None:
    assert is_binary(ole("Root Entry", "Catalog"))
    assert code_of(ole("Root Entry", "Catalog")) == "unsupported_file"


@pytest.mark.parametrize("kind", ["vnd.oasis.opendocument.text", "epub+zip"])
def test_opendocument_and_epub_are_documents_that_cannot_be_read(kind: str) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("mimetype", f"application/{kind}")
        archive.writestr("content.xml", "<x/>")
    assert not is_archive(out.getvalue())
    with pytest.raises(FileError, match="save it as") as caught:
        parse(out.getvalue(), "a.odt")
    assert caught.value.code == "unsupported_file"


def test_a_binary_workbook_says_what_to_save_it_as() -> None:
    data = repacked(FILES["xlsx"], {"xl/workbook.bin": b"x"})
    with pytest.raises(FileError, match=r"\.xlsx") as caught:
        parse(data, "a.xlsx")
    assert caught.value.code == "unsupported_file"


# --- damage ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0.3, 0.7, 0.999])
def test_a_file_cut_short_is_invalid(kind: str, cut: float) -> None:
    data = FILES[kind][: int(len(FILES[kind]) * cut)]
    assert code_of(data) == "invalid_file"
    assert not is_archive(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_without_its_main_part_is_invalid(kind: str) -> None:
    main = {"docx": "word/document.xml", "pptx": "ppt/presentation.xml", "xlsx": "xl/workbook.xml"}[kind]
    assert code_of(repacked(FILES[kind], {main: None})) == "invalid_file"
    assert code_of(repacked(FILES[kind], {main: b"<not xml"})) == "invalid_file"
    if kind != "xlsx":  # openpyxl finds it by its content type
        assert code_of(repacked(FILES[kind], {"_rels/.rels": None})) == "invalid_file"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(25))
def test_flipped_bytes_never_end_in_another_error(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(FILES[kind])
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        parse(bytes(data), "a")
    except FileError as error:
        assert error.code in {"invalid_file", "unsupported_file", "archive_limit", "password_required"}  # noqa: PT017


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_parts_with_pieces_missing_or_twice_never_end_in_another_error(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    with zipfile.ZipFile(io.BytesIO(FILES[kind])) as package:
        names = [name for name in package.namelist() if name.endswith((".xml", ".rels"))]
    name = MAIN[kind] if seed % 2 else rng.choice(names)
    part = member(FILES[kind], name)
    marks = [index for index, byte in enumerate(part) if byte in b'<>" ']
    first, second = sorted(rng.sample(marks, 2))
    piece = part[first:second] if seed % 4 < 2 else b""
    changed = part[:first] + piece + piece + part[second:]
    try:
        parse(repacked(FILES[kind], {name: changed}), "a")
    except FileError as error:
        assert error.code in {"invalid_file", "no_text_extracted"}  # noqa: PT017


# --- attacks ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["main part", "picture", "part nobody refers to"])
def test_fifty_megabytes_of_zeros_are_refused_in_little_memory(kind: str, where: str) -> None:
    name = {"main part": MAIN[kind], "picture": "media/image1.png", "part nobody refers to": "zeros.bin"}[where]
    data = repacked(FILES[kind], {name: bytes(50 << 20)})
    assert len(data) < 1 << 20
    code, peak = peak_of(data)
    assert code == "archive_limit"
    assert peak < 4 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_megabytes_of_blank_xml_are_refused_in_a_child_and_the_next_file_is_read(kind: str, pool: ParserPool) -> None:
    part = member(FILES[kind], MAIN[kind])
    assert code_of(repacked(FILES[kind], {MAIN[kind]: part + b" " * (50 << 20)}), pool.parse) == "archive_limit"
    assert SECRET in pool.parse(FILES[kind], "next").text


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_thousand_parts_are_refused(kind: str) -> None:
    data = repacked(FILES[kind], {f"{n}.xml": b"" for n in range(20_000)})
    assert detect(data, "a") == kind
    code, peak = peak_of(data)
    assert code == "archive_limit"
    assert peak < 4 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_counted_as_read_and_added_up(kind: str) -> None:
    noise = random.Random(1).randbytes(40_000)
    caps = Caps(entries=1000, total_bytes=1_000_000, file_bytes=1_000_000)
    inspect(repacked(FILES[kind], {}), caps)
    many = repacked(FILES[kind], {f"{n}.bin": noise for n in range(30)})
    with pytest.raises(FileError) as caught:
        inspect(many, caps)
    assert caught.value.code == "archive_limit"
    with pytest.raises(FileError) as caught:
        inspect(repacked(FILES[kind], {"a.xml": noise}), Caps(1000, 1_000_000, 30_000))
    assert caught.value.code == "archive_limit"


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_that_the_header_understates_is_no_way_in(kind: str) -> None:
    data = bytearray(repacked(FILES[kind], {"zeros.xml": bytes(50 << 20)}))
    directory = data.rindex(b"PK\x01\x02")
    data[directory + 24 : directory + 28] = (1000).to_bytes(4, "little")
    code, peak = peak_of(bytes(data))
    assert code == "invalid_file"
    assert peak < 4 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_zips_inside_are_not_opened(kind: str) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(60 << 20))
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(20):
            archive.writestr(f"{number}.zip", inner.getvalue())
    data = repacked(FILES[kind], {"word/embeddings/a.zip": outer.getvalue()})
    tracemalloc.start()
    try:
        assert SECRET in parse(data, "a").text
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


LAUGHS = '<!DOCTYPE x [<!ENTITY a "ha">' + "".join(
    f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 10}">' for n in range(9)
) + "]>"  # fmt: skip
OUTSIDE = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("declared", [LAUGHS, OUTSIDE], ids=["laughs", "outside"])
@pytest.mark.parametrize("coding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("where", ["main part", "relations"])
def test_entities_are_refused(kind: str, declared: str, coding: str, where: str) -> None:
    name = MAIN[kind] if where == "main part" else "_rels/.rels"
    body = member(FILES[kind], name).decode("utf-8").partition("?>")[2] or member(FILES[kind], name).decode("utf-8")
    entity = "&a;" if declared == OUTSIDE else "&j;"
    text = f'<?xml version="1.0" encoding="{coding}"?>' + declared + body.replace(SECRET, entity)
    assert code_of(repacked(FILES[kind], {name: text.encode(coding)})) == "invalid_file"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["../../evil.xml", "/etc/evil.xml", "word/../../evil", "C:\\evil.xml", "..\\evil"])
def test_part_names_that_lead_outside_are_refused(kind: str, name: str) -> None:
    assert code_of(repacked(FILES[kind], {name: b"<x/>"})) == "invalid_file"


def test_relations_that_lead_outside_are_not_followed() -> None:
    name = "word/_rels/document.xml.rels"
    relations = member(FILES["docx"], name).replace(b'Target="styles.xml"', b'Target="../../../../../../etc/passwd"')
    assert relations != member(FILES["docx"], name)
    assert "root:" not in parse(repacked(FILES["docx"], {name: relations}), "a").text


@pytest.mark.parametrize("kind", KINDS)
def test_elements_nested_too_deep_do_no_harm(kind: str) -> None:
    part = member(FILES[kind], MAIN[kind])
    at = part.index(b">", part.index(b"?>") + 2) + 1 if b"?>" in part else part.index(b">") + 1
    deep = part[:at] + b"<a>" * 100_000 + b"</a>" * 100_000 + part[at:]
    data = repacked(FILES[kind], {MAIN[kind]: deep})
    if kind == "xlsx":  # which is read as a stream
        assert SECRET in parse(data, "a").text
    else:
        assert code_of(data) == "invalid_file"


def test_every_office_parser_is_among_these() -> None:
    assert set(KINDS) <= set(PARSERS)
