"""Citations say where a passage stands, and the viewer shows it there: for files of ten kinds, kept versions included."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from email.message import EmailMessage
from typing import Any

import docx
import httpx
import openai
import openpyxl
import pptx
import pypdf
import pytest
from api_kit import Site
from engine_kit import LENGTHS, EngineSite
from fpdf import FPDF
from hypothesis import given
from hypothesis import strategies as st

from ingest.isolate import ParserPool
from ingest.parsers import parse
from serving.api import answer
from serving.doors.passages import _stitched
from serving.engine.types import GenerateRequest
from storage.catalogue.schema import ChunkRow, Document
from storage.errors import UserError

FEE = "The berth fee is forty crowns a night and is paid at the harbour office before noon."
OTHER = "Lamps on the pier are lit at nine and put out at dawn by the night watch of the town."


def text_file() -> bytes:
    return f"﻿# Fees\r\n\r\n{FEE}\r\n\r\n\r\n{OTHER}\r\n\r\n{FEE}\r\n".encode()


def pdf_file() -> bytes:
    """The same paragraph on pages 1 and 3."""
    pdf = FPDF()
    pdf.set_font("helvetica", size=11)
    for body in (FEE, OTHER, f"{FEE} So resolved."):
        pdf.add_page()
        pdf.multi_cell(0, 6, body, new_x="LMARGIN", new_y="NEXT")
    return bytes(pdf.output())


def word_file() -> bytes:
    made, out = docx.Document(), io.BytesIO()
    made.add_heading("Fees", 1)
    made.add_paragraph(FEE)
    table = made.add_table(2, 2)
    for number, cell in enumerate(table._cells):
        cell.text = f"cell {number}"
    made.add_paragraph(OTHER)
    made.save(out)
    return out.getvalue()


def sheet_file() -> bytes:
    made, out = openpyxl.Workbook(), io.BytesIO()
    for row in (["what", "how much"], [FEE, 40], [OTHER, 0]):
        made.active.append(row)
    made.save(out)
    return out.getvalue()


def mail_file() -> bytes:
    """The paragraph stands in an attachment."""
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = "Fees", "harbour@example.org", "you@example.org"
    mail.set_content(OTHER)
    mail.add_attachment(pdf_file(), maintype="application", subtype="pdf", filename="fees.pdf")
    mail.add_attachment(FEE.encode(), maintype="text", subtype="plain", filename="fees.txt")
    return mail.as_bytes()


def slides_file() -> bytes:
    made, out = pptx.Presentation(), io.BytesIO()
    for title, body in (("Fees", FEE), ("Lamps", OTHER)):
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, body
    slide.notes_slide.notes_text_frame.text = FEE
    made.save(out)
    return out.getvalue()


def page_file() -> bytes:
    """Its text is not the file's own: entities, tags, and a script that nobody reads."""
    row = f"<tr><td>lamps &amp; pier</td><td>{OTHER}</td></tr>"
    lines = FEE.replace(" ", "\n", 3)
    body = f"<h1>F&eacute;es</h1>\n<p>{lines}</p><table>{row}</table><ul><li>{FEE}<li>{OTHER}</ul>"
    return f"<!doctype html><html><head><title>T</title><script>var x = 1</script></head><body>{body}</body></html>".encode()


def table_file() -> bytes:
    return f'what,how much\r\n"{FEE}",40\r\n"{OTHER}\r\nEvery day, ""always"".",0\r\n'.encode()


def notebook_file() -> bytes:
    code = {"cell_type": "code", "execution_count": 1, "metadata": {}, "source": ["fee = 40\n", "print(fee)"]}
    code["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["40\n", OTHER]}]
    words = {"cell_type": "markdown", "metadata": {}, "source": ["# Fees\n", "\n", FEE]}
    return json.dumps({"cells": [words, code], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def code_file() -> bytes:
    fee = f'class Berth:\n    def fee(self) -> int:\n        """{FEE}"""\n        return NIGHT\n'
    return f'"""Fees. {OTHER}"""\n\nNIGHT = 40\n\n\n{fee}'.encode()


KINDS = {
    "fees.txt": text_file, "fees.pdf": pdf_file, "fees.docx": word_file, "fees.xlsx": sheet_file, "fees.eml": mail_file,
    "fees.pptx": slides_file, "fees.html": page_file, "fees.csv": table_file, "fees.ipynb": notebook_file, "fees.py": code_file,
}  # fmt: skip


@pytest.fixture
def reading(site: Site) -> Iterator[Site]:
    """A site with the real parsers."""
    with ParserPool() as pool:
        site.work.parser = pool  # type: ignore[assignment]
        site.work.max_tokens = 40
        yield site


def cited(site: Site, corpus: str, question: str = "berth fee", **preread: Any) -> list[dict[str, Any]]:
    body = {"model": f"echo-1@{corpus}", "messages": [{"role": "user", "content": question}], "preread": {"top_k": 50, **preread}}
    with site.http() as http:
        found: list[dict[str, Any]] = http.post("/v1/chat/completions", json=body).raise_for_status().json()["citations"]
        return found


def passage(site: Site, citation: dict[str, Any], key: str | None = None, **changes: Any) -> httpx.Response:
    span = {"start": citation["start"], "end": citation["end"], "context": 100_00, **changes}
    with site.http(key) as http:
        path = f"/v1/vector_stores/{citation['corpus_id']}/files/{citation['file_id']}/passage"
        return http.get(path, params=span)


@pytest.mark.parametrize("name", KINDS)
def test_every_citation_is_the_sources_own_text_and_the_viewer_shows_it_there(reading: Site, name: str) -> None:
    data = KINDS[name]()
    corpus = reading.corpus_of("harbour", {name: data})
    source = parse(data, name).text
    citations = cited(reading, corpus)
    assert any(FEE[:20] in " ".join(c["quote"].split()) for c in citations)
    for citation in citations:
        start, end = citation["start"], citation["end"]
        assert source[start:end] == citation["quote"]
        assert citation["line_start"] == 1 + source.count("\n", 0, start)
        assert citation["line_end"] == 1 + source.count("\n", 0, end - 1)
        shown = passage(reading, citation).raise_for_status().json()
        assert shown["quote"] == citation["quote"]
        assert shown["before"].split() == source[:start].split()
        assert shown["after"].split() == source[end:].split()
        assert len(shown["before"]) == start
        if "\r" not in source:
            assert shown["before"].count("\n") == source.count("\n", 0, start)
        for field in ("version", "headings", "page_start", "page_end", "line_start", "line_end", "filename", "document_id"):
            assert shown[field] == citation[field], field
        assert (shown["current"], shown["valid_to"]) == (True, None)


def test_a_paragraph_that_stands_on_two_pages_is_cited_on_both(reading: Site) -> None:
    reading.work.max_tokens = 24  # a paragraph each
    corpus = reading.corpus_of("harbour", {"fees.pdf": pdf_file()})
    pages = [" ".join(page.extract_text().split()) for page in pypdf.PdfReader(io.BytesIO(pdf_file())).pages]
    found = sorted(cited(reading, corpus), key=lambda c: c["start"])
    assert [c["page_start"] for c in found if "berth" in c["quote"]] == [1, 3]
    assert "So resolved." in found[-1]["quote"]
    for citation in found:
        assert citation["page_start"] == citation["page_end"]
        assert " ".join(citation["quote"].split()) in pages[citation["page_start"] - 1]


def test_part_of_a_passage_has_lines_of_its_own(reading: Site) -> None:
    corpus = reading.corpus_of("harbour", {"poem.md": "# Poem\n\none\ntwo\nthree\nfour\n"})
    [citation] = cited(reading, corpus, "three")
    at = citation["quote"].index("three") + citation["start"]
    shown = passage(reading, citation, start=at, end=at + 6, context=4).json()
    assert (shown["before"], shown["quote"], shown["after"]) == ("two\n", "three\n", "four")
    assert (shown["line_start"], shown["line_end"]) == (5, 5)


def test_what_was_replaced_is_said_to_be_and_a_kept_version_is_shown(site: Site) -> None:
    corpus = site.corpus_of("harbour", {"fees.txt": FEE})
    [old] = cited(site, corpus)
    put_again(site, corpus, OTHER)
    reply = passage(site, old)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "document_replaced")
    assert FEE not in reply.text

    with site.http() as http:
        http.put(f"/v1/corpora/{corpus}/settings", json={"keep_versions": 3}).raise_for_status()
    time.sleep(0.01)
    [then], moment = cited(site, corpus, "lamps"), time.time()
    put_again(site, corpus, "The pier is closed.")
    shown = passage(site, then).json()
    assert (shown["quote"], shown["current"], shown["version"]) == (OTHER, False, then["version"])
    assert shown["valid_from"] <= moment < shown["valid_to"]
    [kept] = cited(site, corpus, "lamps", as_of=moment)
    assert passage(site, kept).json() == shown


def put_again(site: Site, corpus: str, text: str) -> None:
    with site.http() as http:
        http.post(f"/v1/corpora/{corpus}/documents", files=[("files", ("fees.txt", text))]).raise_for_status()
    site.ingest()


def test_a_deleted_document_shows_nothing_at_once(site: Site) -> None:
    corpus = site.corpus_of("harbour", {"fees.txt": FEE})
    [citation] = cited(site, corpus)
    with site.http() as http:
        http.delete(f"/v1/vector_stores/{corpus}/files/{citation['file_id']}").raise_for_status()
    reply = passage(site, citation)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert "deleted" in reply.text
    assert FEE[:12] not in reply.text


def test_a_document_that_is_not_read_yet_says_so(site: Site) -> None:
    with site.http() as http:
        corpus = http.post("/v1/vector_stores", json={"name": "harbour"}).json()["id"]
        file = http.post("/v1/files", files={"file": ("fees.txt", FEE.encode())}).json()["id"]
        http.post(f"/v1/vector_stores/{corpus}/files", json={"file_id": file}).raise_for_status()
    reply = passage(site, {"corpus_id": corpus, "file_id": file, "start": 0, "end": 3})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "document_not_read")


def test_a_closed_document_is_shown_to_those_on_its_list_only(site: Site) -> None:
    insider, outsider = site.key("read", "write"), site.key("read", "write")
    with site.http(insider) as http:
        corpus = http.post("/v1/vector_stores", json={"name": "harbour"}).json()["id"]
        file = http.post("/v1/files", files={"file": ("fees.txt", FEE.encode())}).json()["id"]
        http.post(f"/v1/vector_stores/{corpus}/files", json={"file_id": file, "access": []}).raise_for_status()
    site.ingest()
    citation = {"corpus_id": corpus, "file_id": file, "start": 0, "end": 9}
    assert passage(site, citation, insider).json()["quote"] == FEE[:9]
    answers = [passage(site, {**citation, "file_id": f}, outsider) for f in (file, "file-unknown")]
    assert [a.status_code for a in answers] == [404, 404]
    assert answers[0].text.replace(file, "*") == answers[1].text.replace("file-unknown", "*")


@pytest.mark.parametrize(
    ("start", "end", "status"),
    [(0, len(FEE), 200), (0, len(FEE) + 1, 400), (9_000, 9_001, 400), (5, 5, 400), (6, 5, 400), (-1, 3, 400), (0, 200_000, 400)],
)
def test_a_span_is_within_the_document(site: Site, start: int, end: int, status: int) -> None:
    corpus = site.corpus_of("harbour", {"fees.txt": FEE})
    [citation] = cited(site, corpus)
    assert passage(site, citation, start=start, end=end).status_code == status


LINE = st.text(alphabet="ab \t", max_size=6)


@given(text=st.lists(LINE, max_size=12).map("\n".join), low=st.integers(0, 60), size=st.integers(1, 60))
def test_offsets_hold_whatever_is_blank_between_chunks(text: str, low: int, size: int) -> None:
    chunks, at = [], 0
    for word in text.split():
        at = text.index(word, at)
        line = 1 + text.count("\n", 0, at)
        chunks.append(ChunkRow(text=word, start=at, end=at + len(word), line_start=line, line_end=line))
        at += len(word)
    high = min(low + size, at)
    if low < high:
        shown = _stitched(chunks, low, high)
        assert len(shown) == high - low
        for had, has in zip(text[low:high], shown, strict=True):
            assert had == has or (had.isspace() and has.isspace())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [True, False])
def test_without_a_passage_a_caller_that_requires_one_is_refused_and_no_model_is_asked(
    site: Site, stream: bool, named: bool
) -> None:
    corpus = site.corpus_of("empty", {})
    client: openai.OpenAI = site.client()
    asked: Any = client.chat.completions.create(
        model=f"echo-1@{corpus}" if named else "echo-1", stream=stream,
        messages=[{"role": "user", "content": "how much?"}], extra_body={"preread": {"require_context": True}},
    )  # fmt: skip
    if stream:
        chunks = list(asked)
        said = [c.choices[0].delta for c in chunks]
        message, end = next(d for d in said if d.refusal), chunks[-1]
        assert not any(d.content for d in said)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        message, end = asked.choices[0].message, asked
    assert (message.refusal, message.content) == (answer.NOTHING_FOUND, None)
    assert (end.citations, end.preread["method"], site.engine.requests) == ([], "none", [])


def test_with_a_passage_a_caller_that_requires_one_is_answered(site: Site) -> None:
    corpus = site.corpus_of("harbour", {"fees.txt": FEE})
    assert [c["quote"] for c in cited(site, corpus, require_context=True)] == [FEE]
    assert site.engine.requests[0].needs_chunks


def test_a_citation_names_its_chunk_and_a_link_its_place(site: Site) -> None:
    site.corpus_of("other", {"first.txt": OTHER})
    corpus = site.corpus_of("harbour", {"fees.txt": f"{FEE}\n\n{OTHER}"})
    site.engine.answer = "see [1], [2]"
    body = {"model": f"echo-1@{corpus}", "messages": [{"role": "user", "content": "berth fee and lamps"}]}
    with site.http() as http:
        reply = http.post("/v1/chat/completions", json=body).json()
    found = reply["citations"]
    assert [c["chunk_id"] for c in found] == [c.chunk_id for c in site.engine.requests[0].chunks]
    assert {c["chunk_id"] for c in found}.isdisjoint({0, 1})
    links = [n["url_citation"]["url"] for n in reply["choices"][0]["message"]["annotations"]]
    assert links == [f"{site.url}/#passage/{corpus}/{c['file_id']}/{c['start']}-{c['end']}" for c in found[:2]]
    assert any(c["start"] for c in found[:2])


def test_a_document_that_two_names_share_is_one_passage(site: Site) -> None:
    corpus = site.corpus_of("harbour", {"a.txt": FEE, "b.txt": FEE})
    with site.parts.catalogue.write() as session:
        one, two = session.query(Document).order_by(Document.path)
        two.file_id = one.file_id
        file = one.file_id
    shown = passage(site, {"corpus_id": corpus, "file_id": file, "start": 0, "end": 9}).json()
    assert shown["quote"] + shown["after"] == FEE


def test_a_question_that_leaves_no_room_for_a_passage_is_refused_if_one_is_required(engine_site: EngineSite) -> None:
    whole = engine_site.answer()
    bare = whole.prompt_tokens - sum(LENGTHS)
    request = engine_site.request(max_tokens=engine_site.reader.max_positions - bare - 5)

    async def planned(request: GenerateRequest) -> int:
        generation = engine_site.engine.submit(request)
        generation.cancel()
        return len(generation.plan.chunks)

    assert (len(whole.used_chunks), asyncio.run(planned(request))) == (3, 0)
    with pytest.raises(UserError) as caught:
        asyncio.run(planned(replace(request, needs_chunks=True)))
    assert caught.value.code == "context_length_exceeded"
