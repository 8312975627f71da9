"""Office files on their way through the job: documents wherever they come from, whatever they are called."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from fixtures_work import WordTokenizer, Work
from office_kit import paragraph, word

from ingest.chunker import cut
from ingest.isolate import ParserPool
from ingest.parsers import parse
from ingest.sources import FolderSource
from storage.catalogue.schema import Document

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)


def files() -> dict[str, str | bytes]:
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w") as archive:
        archive.writestr("contracts/lease", word(paragraph("Rent is due.")))
        archive.writestr("locked.docx", OLE + "EncryptedPackage".encode("utf-16-le"))
    return {
        "named.zip": word(paragraph("Alone.")),
        "all.docx": inside.getvalue(),
        "old.docx": OLE + "WordDocument".encode("utf-16-le"),
    }


def test_a_document_called_zip_is_read_and_an_archive_called_document_is_expanded(work: Work) -> None:
    corpus = work.corpus()
    with ParserPool() as pool:
        work.parser = pool  # type: ignore[assignment]
        job = work.ingest(corpus, files())
    work.compute_kv()
    assert work.chunks(corpus, "named.zip") == ["Alone."]
    assert work.chunks(corpus, "all.docx!/contracts/lease") == ["Rent is due."]
    codes = {error["filename"]: error["code"] for error in work.view(job)["errors"]}
    assert codes == {"all.docx!/locked.docx": "password_required", "old.docx": "unsupported_file"}
    assert work.view(job)["status"] == "completed_with_errors"
    assert work.count(Document, Document.status == "completed") == 3


def test_pointers_and_minified_scripts_that_are_uploaded_fail_with_the_reason(work: Work) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    with ParserPool() as pool:
        work.parser = pool  # type: ignore[assignment]
        long = "a" * 30_000
        job = work.ingest(work.corpus(), {"big.txt": pointer, "app.JS": f"var a='{long}';", "prose.txt": f"{long} b"})
    shown = work.view(job)["errors"]
    assert {each["filename"]: (each["code"], each["message"]) for each in shown} == {
        "big.txt": ("unsupported_file", "This file is not read: git LFS pointer; the file itself is not here."),
        "app.JS": ("unsupported_file", "This file is not read: minified."),
    }


def test_a_folder_offers_archives_and_office_files_also_those_that_cannot_be_read(tmp_path: Path) -> None:
    for name, data in files().items():
        assert isinstance(data, bytes)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "program").write_bytes(b"\x7fELF\0\0")
    source = FolderSource(tmp_path)
    assert [entry.path for entry in source.manifest()] == ["all.docx", "named.zip", "old.docx"]
    assert {left.path: left.reason for left in source.skipped} == {"program": "binary"}


def test_a_page_of_a_document_is_cited_by_its_headings() -> None:
    data = word(paragraph("Term", '<w:pStyle w:val="Heading1"/>'), paragraph("It is a year."))
    (chunk,) = cut(parse(data, "a"), WordTokenizer(), max_tokens=50)
    assert (chunk.text, chunk.headings, chunk.page_start) == ("Term\n\nIt is a year.", ("Term",), None)
