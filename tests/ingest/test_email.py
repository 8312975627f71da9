"""E-mails: the head, the best of the alternatives, and attachments read or named."""

from __future__ import annotations

import io
import mailbox
import random
import zipfile
from email.message import EmailMessage
from pathlib import Path

import docx
import pytest
from fpdf import FPDF
from office_kit import block_with, check_blocks, saved

from ingest.detect import detect
from ingest.parsers import PARSERS, parse
from ingest.parsers.email import EmailParser
from storage.errors import FileError
from storage.types import ParsedDocument


def mail(subject: str = "Offer", body: str | None = "Hello.\n", **fields: str) -> EmailMessage:
    message = EmailMessage()
    message["From"] = "Ann <ann@example.org>"
    message["To"] = "bob@example.org"
    message["Date"] = "Mon, 04 Mar 2024 10:00:00 +0100"
    message["Subject"] = subject
    for name, value in fields.items():
        message[name] = value
    if body is not None:
        message.set_content(body)
    return message


def read(message: EmailMessage | bytes) -> ParsedDocument:
    document = parse(message if isinstance(message, bytes) else message.as_bytes(), "named.txt")
    check_blocks(document)
    return document


HEAD = "From: Ann <ann@example.org>\nTo: bob@example.org\nDate: Mon, 04 Mar 2024 10:00:00 +0100\nSubject: Offer"


# --- what it is ---


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"From: a@b\nTo: c@d\nSubject: x\n\nbody", "email"),
        (b"Received: by x\n\tfor y\nFrom: a@b\r\nX-Empty:\r\n\r\nbody", "email"),
        (b"Received: " + b"x" * 9000 + b"\nFrom: a", "text"),
        (b"Return-Path: <a>\nFrom: a@b\nX-Long: " + b"y" * 9000, "email"),
        (b"From a@b Mon Mar  4 10:00:00 2024\nFrom: a@b\nMessage-ID: <1>\n\nbody", "email"),
        (b"From: Bonn\nWe set out early.\n\nbody", "text"),
        (b"Title: x\nDate: y\nSubject: z\n\nbody", "text"),
        (b"From: a\n\nSubject: x\nTo: y\n", "text"),
        (b"from: the start\n\nto: the end", "text"),
    ],
)
def test_a_mail_is_told_by_its_header(data: bytes, kind: str) -> None:
    assert detect(data, "a.dat") == kind


# --- head and text ---


def test_head_and_text_stand_under_the_subject() -> None:
    document = read(mail(Cc="carl@example.org", Received="from x"))
    assert document.text.split("\n\n") == [HEAD.replace("Date", "Cc: carl@example.org\nDate"), "Hello."]
    assert block_with(document, "Hello.").headings == ("Offer",)
    assert document.title == "Offer"


def test_plain_text_is_preferred_and_html_is_read_where_there_is_none() -> None:
    both = mail(body="Plain words.\n")
    both.add_alternative("<p>HTML words.</p>", subtype="html")
    assert "Plain words." in read(both).text
    assert "HTML" not in read(both).text
    blank = mail(body=" \n")
    blank.add_alternative("<h1>Title</h1><p>HTML words.</p><script>x()</script>", subtype="html")
    document = read(blank)
    assert "<p>" not in document.text
    assert "x()" not in document.text
    assert block_with(document, "HTML words.").headings == ("Offer", "Title")


@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1", "windows-1252"])
@pytest.mark.parametrize("coding", ["base64", "quoted-printable"])
def test_text_in_any_character_set_and_transfer_encoding(charset: str, coding: str) -> None:
    message = mail(body=None)
    message.set_content("Grüße für Zoë - né\n", charset=charset, cte=coding)
    assert "Grüße für Zoë - né" in read(message).text


def test_japanese_in_shifted_ascii_and_encoded_words() -> None:
    raw = (
        b"From: =?iso-2022-jp?B?GyRCOzNFRBsoQg==?= <y@example.jp>\nTo: b@example.org\nMIME-Version: 1.0\n"
        b"Subject: =?utf-8?Q?Gr=C3=BC=C3=9Fe?=\n =?utf-8?Q?_an_alle?=\nContent-Type: text/plain; charset=iso-2022-jp\n\n"
    ) + "契約書です。".encode("iso-2022-jp")
    document = read(raw)
    assert "契約書です。" in document.text
    assert "From: 山田 <y@example.jp>" in document.text
    assert document.title == "Grüße an alle"


def test_a_wrong_character_set_and_raw_bytes_in_the_head_are_read_all_the_same() -> None:
    raw = "From: Zoë <z@example.org>\nTo: x\nSubject: né\nContent-Type: text/plain; charset=us-ascii\n\nça va".encode()
    document = read(raw)
    assert "From: Zoë" in document.text
    assert "ça va" in document.text
    unknown = raw.replace(b"us-ascii", b"no-such-set").replace(b"n\xc3\xa9", b"=?no-such?Q?x?=")
    assert "ça va" in read(unknown).text


# --- attachments ---


def test_attachments_are_read_by_their_own_parsers_under_their_names() -> None:
    document = docx.Document()
    document.add_heading("Terms", 1)
    document.add_paragraph("The cap is ten.")
    message = mail()
    message.add_attachment(saved(document), maintype="application", subtype="octet-stream", filename="Verträge/terms.docx")
    message.add_attachment(b"name,age\nann,1\nbob,2\n", maintype="text", subtype="csv", filename="people.csv")
    found = read(message)
    assert block_with(found, "cap is ten").headings == ("Offer", "Attachment: terms.docx", "Terms")
    table = block_with(found, "bob,2")
    assert (table.kind, table.header, table.headings) == ("table", "name,age", ("Offer", "Attachment: people.csv"))
    assert found.text[table.breaks[0] :].startswith("bob,2")


def test_pages_of_an_attachment_are_its_own_and_end_with_it() -> None:
    pdf = FPDF()
    pdf.set_font("helvetica")
    for number in (1, 2):
        pdf.add_page()
        pdf.cell(text=f"Page words {number}.")
    message = mail()
    message.add_attachment(bytes(pdf.output()), maintype="application", subtype="pdf", filename="a.pdf")
    message.add_attachment(b"After.", maintype="text", subtype="plain", filename="z.txt")
    document = read(message)
    pages = {words: [a.page for a in document.anchors if a.start <= document.text.index(words)][-1]
             for words in ("Hello", "Page words 1", "Page words 2", "After")}  # fmt: skip
    assert pages == {"Hello": None, "Page words 1": 1, "Page words 2": 2, "After": None}


def test_what_cannot_be_read_is_named_with_its_code() -> None:
    message = mail()
    message.add_attachment(b"\x89PNG\r\n\x1a\n\0", maintype="image", subtype="png", filename="logo.png")
    message.add_attachment(b"", maintype="text", subtype="plain", filename="void.txt")
    message.add_attachment(b"%PDF-1.4 broken", maintype="application", subtype="pdf", filename="bad.pdf")
    document = read(message)
    lines = [
        "The attachment 'logo.png' was not read: unsupported_file.",
        "The attachment 'void.txt' was not read: empty_file.",
        "The attachment 'bad.pdf' was not read: invalid_file.",
    ]
    assert document.warnings == tuple(lines)
    assert all(f"[{line}]" in document.text for line in lines)


def test_a_bomb_in_an_attachment_costs_the_attachment_only() -> None:
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", "<x/>")
        archive.writestr("word/document.xml", bytes(50 << 20))
    message = mail()
    message.add_attachment(bomb.getvalue(), maintype="application", subtype="zip", filename="a.docx")
    assert "[The attachment 'a.docx' was not read: archive_limit.]" in read(message).text


def test_signatures_are_passed_over() -> None:
    message = mail()
    message.add_attachment(b"\x30\x82\0\0", maintype="application", subtype="pkcs7-signature", filename="smime.p7s")
    assert read(message).warnings == ()


# --- messages within messages ---


def nested(depth: int) -> EmailMessage:
    message = mail(subject=f"Level {depth}", body=f"Body {depth}.\n")
    if depth:
        message.add_attachment(nested(depth - 1))
    return message


def test_an_attached_message_is_read_with_its_own_attachments() -> None:
    inner = mail(subject="Inner", body="Inner body.\n")
    inner.add_attachment(b"# Deep\n\nDeep words.\n", maintype="text", subtype="markdown", filename="deep.md")
    outer = mail()
    outer.add_attachment(inner)
    document = read(outer)
    assert block_with(document, "Inner body").headings == ("Offer", "Attachment: Inner")
    assert block_with(document, "Deep words").headings == ("Offer", "Attachment: Inner", "Attachment: deep.md", "Deep")


def test_a_message_attached_as_a_file_is_a_message() -> None:
    message = mail()
    data = mail(subject="Inner", body="Inner body.\n").as_bytes()
    message.add_attachment(data, maintype="application", subtype="octet-stream", filename="inner.eml")
    assert block_with(read(message), "Inner body").headings == ("Offer", "Attachment: inner.eml")


def test_messages_nested_too_deep_are_named() -> None:
    document = read(nested(12))
    assert "Body 5." in document.text
    assert "Body 4." not in document.text
    assert document.warnings == ("The attachment 'Level 4' was not read: archive_limit.",)


@pytest.mark.parametrize("limits", [{"parts": 5}, {"characters": 600}])
def test_more_attachments_than_the_cap_are_named_once(limits: dict[str, int]) -> None:
    message = mail()
    for number in range(30):
        message.add_attachment(f"Words {number:03d}. ".encode() * 10, maintype="text", subtype="plain", filename=f"{number}.txt")
    document = EmailParser(parse, **limits).parse(message.as_bytes(), "a")
    assert "Words 000" in document.text
    assert "Words 029" not in document.text
    (warning,) = document.warnings
    assert warning.endswith("and what follows was not read: archive_limit.")
    assert warning in document.text


def test_a_mailbox_is_read_message_by_message(tmp_path: Path) -> None:
    box = mailbox.mbox(tmp_path / "box")
    box.add(mail(subject="Re: x", body="First.\n\nFrom here 2024\n"))
    box.add(mail(subject="Re: x", body="Second.\n"))
    box.close()
    document = read((tmp_path / "box").read_bytes())
    assert block_with(document, "First.").headings == ("1. Re: x",)
    assert block_with(document, "Second.").headings == ("2. Re: x",)
    assert "\nFrom here 2024" in document.text


# --- damage ---


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_mail_never_ends_in_another_error(seed: int) -> None:
    rng = random.Random(seed)
    message = mail(Cc="=?utf-8?Q?=C3=BC?= <c@example.org>")
    message.add_alternative("<p>HTML</p>", subtype="html")
    message.add_attachment(b"x,y\n1,2\n", maintype="text", subtype="csv", filename="ü.csv")
    message.add_attachment(mail(subject="Inner"))
    data = bytearray(message.as_bytes())
    for _ in range(rng.randint(1, 30)):
        at = rng.randrange(60, len(data))
        piece = rng.choice([b"", b"\n", b";", b'"', b"=", b"\xff", b"=?", b"<", bytes([rng.randrange(256)])])
        data[at : at + rng.randint(1, 3)] = piece
    try:
        PARSERS["email"].parse(bytes(data), "a")
    except FileError as error:
        assert error.code in {"invalid_file", "no_text_extracted"}  # noqa: PT017


def test_thousands_of_nested_parts_are_an_error_of_the_file_at_most() -> None:
    deep = b"From: a@b\nMIME-Version: 1.0\nSubject: x\n" + b"".join(
        b'Content-Type: multipart/mixed; boundary="%d"\n\n--%d\n' % (n, n) for n in range(3000)
    )  # fmt: skip
    try:
        assert "From: a@b" in parse(deep + b"\nend", "a").text
    except FileError as error:
        assert error.code == "invalid_file"  # noqa: PT017
