"""What a file is: by its content first, then by its name."""

from __future__ import annotations

import re

from ingest.encoding import unmarked_wide
from ingest.languages import language_of, suffix_of
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
_SUFFIXES = {
    "md": "markdown", "markdown": "markdown", "mdx": "markdown",
    "html": "html", "htm": "html", "xhtml": "html",
}  # fmt: skip


def detect(data: bytes, name: str) -> str:
    """The name of the parser for this file. Raises FileError for an empty or a binary one."""
    if not data:
        raise FileError("The file is empty.", code="empty_file")
    head = data[:HEAD]
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if is_binary(head):
        raise FileError("This type of file cannot be read.", code="unsupported_file")
    if _HTML.match(head.removeprefix(b"\xef\xbb\xbf")):
        return "html"
    if language_of(data, name) is not None:
        return "code"
    return _SUFFIXES.get(suffix_of(name), "text")


def is_binary(head: bytes) -> bool:
    """Whether a file with these first bytes is neither text in any encoding nor a PDF."""
    if b"%PDF-" in head[:1024]:
        return False
    if head.startswith(_BINARY_MAGIC):
        return True
    return b"\0" in head and not head.startswith(_MARKS) and unmarked_wide(head[: len(head) // 4 * 4]) is None
