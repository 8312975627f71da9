"""Office files by what is in them: zip packages (OOXML, OpenDocument, EPUB), and OLE containers.

A name says nothing: a `.docx` may be a zip of anything, and a document may be called `.zip`.
"""

from __future__ import annotations

import io
import re
import struct
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from storage.errors import FileError

READ = frozenset({"docx", "pptx", "xlsx"})  # kinds that have a parser of that name
_FOLDERS = {b"word/": "docx", b"ppt/": "pptx", b"xl/": "xlsx"}
_SIGNS = frozenset({b"[Content_Types].xml", b"_rels/.rels", b"docProps/app.xml", b"docProps/core.xml"})
_STORED_TYPE = b"mimetypeapplication/"  # OpenDocument and EPUB begin with this member, stored
_FIRST, _LAST = 1 << 16, 2 << 20  # bytes of a long file that are looked at
_MOST = 20_000  # names looked at
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
# Streams of an OLE container → what it is; a message and a text may hold the others, so they are looked for first.
_STREAMS = {"__substg1.0_": ".msg", "EncryptedPackage": "encrypted", "WordDocument": ".doc",
            "PowerPoint Document": ".ppt", "Workbook": ".xls", "Book": ".xls"}  # fmt: skip
_SAVE_AS = {".msg": ".eml", ".doc": ".docx", ".ppt": ".pptx", ".xls": ".xlsx", ".xlsb": ".xlsx"}
_LOCAL = re.compile(rb"PK\x03\x04.{22}(..)..", re.S)


def office_kind(data: bytes) -> str | None:
    """Its parser's name (one of READ), or another office format's, which has no parser; None for any other file.

    The first kilobytes of a zip say nearly as much as all of it; an OLE container is known only whole.
    """
    if data.startswith(_OLE):
        return _ole_kind(data)
    if not data.startswith(b"PK\x03\x04"):
        return None
    if data[30:].startswith(_STORED_TYPE):
        kind = data[30 + len(_STORED_TYPE) :][:64]
        return next((k for k in ("opendocument", "epub") if k.encode() in kind), None)
    names = set(_names(data))
    if not names & _SIGNS:
        return None
    if b"xl/workbook.bin" in names:
        return ".xlsb"
    parts = Counter(kind for folder, kind in _FOLDERS.items() for name in names if name.startswith(folder))
    return parts.most_common(1)[0][0] if parts else None


def ends_of(stream: BinaryIO) -> bytes:
    """A file's first and last bytes, which say of a zip what it is; the stream stands at its beginning afterwards."""
    head = stream.read(_FIRST)
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(len(head), size - _LAST))
    tail = stream.read()
    stream.seek(0)
    return head + tail


def office_parser(data: bytes) -> str | None:
    """The parser for an office file, None for another file. Raises FileError for one that cannot be read."""
    kind = office_kind(data)
    if kind is None or kind in READ:
        return kind
    if kind == "encrypted":
        raise FileError("The file is protected by a password; remove it and send the file again.", code="password_required")
    wanted = _SAVE_AS.get(kind, "an office format with an x at its end (.docx, .xlsx, .pptx)")
    raise FileError(f"{kind.capitalize()} files cannot be read; save it as {wanted} and send it again.", code="unsupported_file")


def _ole_kind(data: bytes) -> str | None:
    """What an OLE container holds, by the names in its directory, which are UTF-16."""
    return next((kind for name, kind in _STREAMS.items() if name.encode("utf-16-le") in data), None)


def _names(data: bytes) -> Iterator[bytes]:
    """Names in a zip: from its directory, or where that is missing from the members' own headers at its beginning."""
    end = data.rfind(b"PK\x05\x06", max(0, len(data) - 65_557))
    size = struct.unpack_from("<I", data, end + 12)[0] if 0 <= end <= len(data) - 22 else 0
    at = end - size
    if size == 0 or at < 0:
        for match in _LOCAL.finditer(data[:_FIRST]):
            yield data[match.end() : match.end() + int.from_bytes(match[1], "little")]
        return
    for _ in range(_MOST):
        if data[at : at + 4] != b"PK\x01\x02" or at + 46 > end:
            return
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        yield data[at + 46 : at + 46 + name]
        at += 46 + name + extra + comment
