"""What a file is: by its content first, then by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from xml.parsers import expat

from ingest.delimiter import delimiter_of
from ingest.encoding import decode, unmarked_wide
from ingest.guess import format_of
from ingest.languages import NAMELESS, language_of, suffix_of
from ingest.mail import is_mail
from ingest.office import office_kind, office_parser
from storage.errors import FileError

HEAD = 8192  # bytes looked at
_BINARY_MAGIC = (
    b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"7z\xbc\xaf\x27\x1c", b"Rar!",
    b"\x89PNG", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"\x7fELF", b"\xd0\xcf\x11\xe0", b"OggS", b"ID3",
    b"\0asm", b"%!PS",
)  # fmt: skip
_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff", b"\xef\xbb\xbf")
_HTML = re.compile(
    rb"\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--.{0,4000}?-->\s*)*<(?:!doctype\s+html|html[\s>])", re.I | re.S
)
_BY_NAME = {
    suffix: parser
    for parser, suffixes in {
        "markdown": "md markdown mdx",
        "html": "html htm xhtml",
        "csv": "csv tsv tab psv",
        "json": "json jsonl ndjson geojson webmanifest",
        "yaml": "yaml yml",
        "toml": "toml",
        "ini": "ini cfg conf properties env editorconfig",
        "xml": "xml xsd xsl xslt wsdl rss atom plist csproj",
    }.items()
    for suffix in suffixes.split()
}
_LFS = b"version https://git-lfs.github.com/spec/"
_LONGEST_LINE = 20_000  # bytes: a script or style sheet with such a line was minified
_MINIFIABLE = (".js", ".mjs", ".cjs", ".css")
_MARKUP = frozenset({"html", "markdown"})  # whose files may begin with a tag


def detect(data: bytes, name: str) -> str:
    """The name of the parser for this file. Raises FileError for an empty or a binary one."""
    if not data:
        raise FileError("The file is empty.", code="empty_file")
    if b"%PDF-" in data[:HEAD][:1024]:
        return "pdf"
    if (office := office_parser(data)) is not None:
        return office
    if is_binary(data):
        raise FileError("This type of file cannot be read.", code="unsupported_file")
    if reason := stands_for_another(name, data):
        raise FileError(f"This file is not read: {reason}.", code="unsupported_file")
    named = _BY_NAME.get(suffix_of(name))
    for parser, says_so in _BY_CONTENT.items():
        if says_so(data, named):
            return parser
    if (named is None or data.startswith(b"#!")) and language_of(data, name) is not None:
        return "code"
    return named or format_of(data) or ("csv" if suffix_of(name) in NAMELESS and _is_table(data) else "text")


def is_binary(data: bytes) -> bool:
    """Whether a file is neither text in any encoding nor a PDF or an office file. Its first bytes are mostly enough."""
    head = data[:HEAD]
    if b"%PDF-" in head[:1024] or office_kind(data) is not None:
        return False
    if head.startswith(_BINARY_MAGIC):
        return True
    return b"\0" in head and not head.startswith(_MARKS) and unmarked_wide(head[: len(head) // 4 * 4]) is None


def stands_for_another(name: str, data: bytes) -> str:
    """Why a text is no document, though it could be read: a pointer that git LFS left, or what a program made of a script or a
    style sheet. "" for any other text."""
    if data.startswith(_LFS):
        return "git LFS pointer; the file itself is not here"
    if name.lower().endswith(_MINIFIABLE) and max(map(len, data.split(b"\n"))) > _LONGEST_LINE:
        return "minified"
    return ""


def _is_html(data: bytes, named: str | None) -> bool:
    return _HTML.match(data[:HEAD].removeprefix(b"\xef\xbb\xbf")) is not None


def _is_mail(data: bytes, named: str | None) -> bool:
    return is_mail(data[:HEAD], sure=named is not None)


def _is_notebook(data: bytes, named: str | None) -> bool:
    return b'"nbformat"' in data and isinstance(tree := _json(data), dict) and isinstance(tree.get("cells"), list)


def _is_json(data: bytes, named: str | None) -> bool:
    """One object or array and nothing else, or one on each of the first two lines."""
    first = data[:HEAD].split(b"\n")[:2]
    return _json(data) is not None or (len(first) == 2 and all(_json(line) is not None for line in first))


def _is_xml(data: bytes, named: str | None) -> bool:
    """An XML declaration, or one element and nothing else."""
    start = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"<?xml") or not start.startswith(b"<") or named in _MARKUP:
        return start.startswith(b"<?xml")
    try:
        expat.ParserCreate().Parse(start, True)
    except expat.ExpatError:
        return False
    return True


def _is_table(data: bytes) -> bool:
    """Equally many cells in every line, of a file whose name says nothing."""
    try:
        return delimiter_of(decode(data).split("\n"), strict=True) is not None
    except FileError:
        return False


# What a file's content can say whatever it is called, in this order.
_BY_CONTENT: Mapping[str, Callable[[bytes, str | None], bool]] = MappingProxyType(
    {"html": _is_html, "email": _is_mail, "notebook": _is_notebook, "json": _is_json, "xml": _is_xml}
)


def _json(data: bytes) -> Any:
    """The object or array that these bytes are; None for anything else."""
    begins = data[:HEAD].lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n")[:1]
    try:
        return json.loads(data) if begins in (b"{", b"[") else None
    except (ValueError, RecursionError):
        return None
