"""E-mails and mailboxes: who wrote to whom, what, and the attachments, each read by the parser of its own kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email import message_from_bytes
from email.errors import MessageError
from email.header import decode_header, make_header
from email.message import Message

from ingest.detect import detect
from ingest.encoding import decode
from ingest.mail import MAILBOX
from ingest.parsers.damage import reading
from ingest.parsers.html import HtmlParser
from ingest.parsers.text import TextParser
from ingest.parsers.writer import Writer
from storage.errors import FileError
from storage.types import ParsedDocument

_SHOWN = ("From", "To", "Cc", "Date", "Subject")
_TEXTS = frozenset({"text/plain", "text/html"})
_SIGNATURES = frozenset({"application/pkcs7-signature", "application/x-pkcs7-signature", "application/pgp-signature"})
_SHIFTED = ("iso-2022", "hz")  # character sets whose bytes pass for ASCII
Read = Callable[[bytes, str], ParsedDocument]  # any other file than a mail


@dataclass(frozen=True)
class EmailParser:
    """The plain text where a message has one, else its HTML. What cannot be read is named with the reason's code."""

    read: Read
    name: str = "email"
    version: int = 1
    depth: int = 8  # messages within messages
    parts: int = 1_000  # attachments and texts of one file, messages of a mailbox included
    characters: int = 20_000_000

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        with reading("message"):
            run = _Reading(self, Writer())
            messages = list(_messages(data))
            title = _field(messages[0], "Subject")
            for number, message in enumerate(messages, 1):
                if run.may_read(f"Message {number}"):
                    subject = _field(message, "Subject")
                    label = f"{number}. {subject}" if len(messages) > 1 else subject
                    run.message(message, (label,) if label else (), 0)
            return run.writer.document(title)


def _messages(data: bytes) -> Iterator[Message]:
    """The message, or those of a mailbox."""
    data = data.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    starts = [m for m in MAILBOX.finditer(data) if _after_blank(data, m.start())] if MAILBOX.match(data) else []
    if not starts:
        yield message_from_bytes(data)
    ends = [match.start() for match in starts[1:]] + [len(data)]
    for match, end in zip(starts, ends, strict=False):
        body = data[match.end() : end].lstrip(b"\r\n")
        yield message_from_bytes(body.replace(b"\n>From ", b"\nFrom "))


def _after_blank(data: bytes, at: int) -> bool:
    return at == 0 or data[max(0, at - 3) : at].replace(b"\r", b"").endswith(b"\n\n")


@dataclass
class _Reading:
    """One file being read, with what it has used of the caps."""

    parser: EmailParser
    writer: Writer
    used: int = 0

    def message(self, message: Message, path: tuple[str, ...], depth: int) -> None:
        """Write a message below a heading path: its head, its text, its attachments."""
        self.writer.path = path
        head = [f"{name}: {value}" for name in _SHOWN if (value := _field(message, name))]
        self.writer.add("paragraph", "\n".join(head))
        attached: list[Message] = []
        for part in _leaves(message):
            if _is_text(part):
                self._text(part, path)
            elif part.get_content_type() not in _SIGNATURES:
                attached.append(part)
        for part in attached:
            self._attachment(part, path, depth)

    def _text(self, part: Message, path: tuple[str, ...]) -> None:
        self.writer.path = path
        try:
            if self.may_read("text"):
                self.writer.embed(_document(part))
        except FileError as error:
            self._left_out("The message's text", error.code)

    def _attachment(self, part: Message, path: tuple[str, ...], depth: int) -> None:
        inner = _inner_message(part)
        name = _filename(part) or (_field(inner, "Subject") if inner is not None else "") or "without a name"
        self.writer.path = (*path, f"Attachment: {name}")
        if not self.may_read(f"The attachment {name!r}"):
            return
        try:
            data = _bytes(part)
            if inner is not None or detect(data, name) == "email":
                self._messages(name, [inner] if inner is not None else list(_messages(data)), depth + 1)
            else:
                document = self.parser.read(data, name)
                self.writer.add("heading", f"Attachment: {name}")
                self.writer.embed(document)
        except FileError as error:
            self._left_out(f"The attachment {name!r}", error.code)

    def _messages(self, name: str, messages: list[Message], depth: int) -> None:
        if depth >= self.parser.depth:
            raise FileError("messages within messages are nested too deep", code="archive_limit")
        path = self.writer.path
        self.writer.add("heading", f"Attachment: {name}")
        for message in messages:
            self.message(message, path, depth)

    def may_read(self, what: str) -> bool:
        """Whether there is room for another part; the first that finds none is named."""
        self.used += 1
        full = self.used > self.parser.parts or self.writer.length > self.parser.characters
        if full and self.used <= self.parser.parts + 1:
            self._left_out(f"{what} and what follows", "archive_limit")
            self.used = self.parser.parts + 1
        return not full

    def _left_out(self, what: str, code: str) -> None:
        text = f"{what} was not read: {code}."
        self.writer.add("paragraph", f"[{text}]")
        self.writer.warnings.append(text)


# --- parts of a message ---


def _leaves(message: Message) -> Iterator[Message]:
    """The parts that hold something, one of each set of alternatives; an attached message is one."""
    stack = [message]
    while stack:
        part = stack.pop()
        if part.get_content_type() == "multipart/alternative":
            stack.append(_preferred(part))
        elif part.get_content_maintype() == "multipart" and part.is_multipart():
            stack += reversed(_parts(part))
        else:
            yield part


def _parts(part: Message) -> list[Message]:
    payload = part.get_payload()
    return [inner for inner in payload if isinstance(inner, Message)] if isinstance(payload, list) else []


def _preferred(alternatives: Message) -> Message:
    """The plain text if it says anything, else the last form, which is the best; an empty part if there is none."""
    inner = _parts(alternatives)
    plain = (p for p in inner if p.get_content_type() == "text/plain" and _bytes(p).strip())
    return next(plain, inner[-1] if inner else Message())


def _is_text(part: Message) -> bool:
    return part.get_content_type() in _TEXTS and part.get_content_disposition() != "attachment" and not _filename(part)


def _inner_message(part: Message) -> Message | None:
    if part.get_content_type() != "message/rfc822":
        return None
    return next(iter(_parts(part)), None)


def _document(part: Message) -> ParsedDocument:
    """A text part by its parser, in the character set that it states, if that fits."""
    data, charset = _bytes(part), part.get_content_charset() or ""
    text = _strict(data, charset) if charset.startswith(_SHIFTED) else None
    if text is None:
        text = decode(data, charset or None)
    parser = HtmlParser() if part.get_content_type() == "text/html" else TextParser()
    return parser.parse(text.rstrip().encode("utf-8", "replace"), "")


def _strict(data: bytes, charset: str) -> str | None:
    try:
        return data.decode(charset)
    except (UnicodeError, LookupError):
        return None


def _bytes(part: Message) -> bytes:
    """What a part holds, out of its transfer encoding; of a report's several parts all."""
    payload = part.get_payload(decode=True)
    return payload if isinstance(payload, bytes) else b"\n".join(inner.as_bytes() for inner in _parts(part))


def _filename(part: Message) -> str:
    name = _words(part.get_filename() or "")
    return name.replace("\\", "/").rsplit("/", 1)[-1].strip()


def _field(message: Message, name: str) -> str:
    """A header field as it reads, on one line; "" where there is none."""
    return " ".join(_words(str(value)) for key, value in message.raw_items() if key.lower() == name.lower())


def _words(raw: str) -> str:
    """A header's text with its encoded words decoded; bytes that should not be in it are taken for UTF-8."""
    text = raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    try:
        text = str(make_header(decode_header(text)))
    except (ValueError, LookupError, MessageError):
        pass  # it reads as it was written
    return " ".join(text.encode("utf-8", "replace").decode().split())
