"""What a file is: by its content first, then by its name."""

from __future__ import annotations

import re

from ingest.encoding import unmarked_wide
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
_SHEBANG = re.compile(rb"#![^\n]*\b(python|node)")

LANGUAGES = {
    "py": "python", "pyi": "python", "js": "javascript", "mjs": "javascript", "cjs": "javascript",
    "jsx": "javascript", "ts": "typescript", "mts": "typescript", "cts": "typescript", "tsx": "tsx",
    "java": "java", "go": "go", "c": "c", "h": "c", "cc": "cpp", "cpp": "cpp", "cxx": "cpp", "hh": "cpp",
    "hpp": "cpp", "hxx": "cpp", "rs": "rust",
}  # fmt: skip
_SUFFIXES = {
    "md": "markdown", "markdown": "markdown", "mdx": "markdown",
    "html": "html", "htm": "html", "xhtml": "html",
}  # fmt: skip


def suffix_of(name: str) -> str:
    """The lower-case part after the last dot of a path's last segment; "" where there is none."""
    _, dot, suffix = name.rsplit("/", 1)[-1].rpartition(".")
    return suffix.lower() if dot else ""


def detect(data: bytes, name: str) -> str:
    """The name of the parser for this file. Raises FileError for an empty or a binary one."""
    if not data:
        raise FileError("The file is empty.", code="empty_file")
    head = data[:HEAD]
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if (office := office_parser(data)) is not None:
        return office
    if is_binary(data):
        raise FileError("This type of file cannot be read.", code="unsupported_file")
    if _HTML.match(head.removeprefix(b"\xef\xbb\xbf")):
        return "html"
    if is_mail(head):
        return "email"
    suffix = suffix_of(name)
    if suffix in LANGUAGES or (not suffix and _SHEBANG.match(head)):
        return "code"
    return _SUFFIXES.get(suffix, "text")


def is_binary(data: bytes) -> bool:
    """Whether a file is neither text in any encoding nor a PDF or an office file. Its first bytes are mostly enough."""
    head = data[:HEAD]
    if b"%PDF-" in head[:1024] or office_kind(data) is not None:
        return False
    if head.startswith(_BINARY_MAGIC):
        return True
    return b"\0" in head and not head.startswith(_MARKS) and unmarked_wide(head[: len(head) // 4 * 4]) is None


def language_of(data: bytes, name: str) -> str:
    """The programming language of a file that `detect` called code."""
    language = LANGUAGES.get(suffix_of(name))
    if (
        language == "c"
        and suffix_of(name) == "h"
        and re.search(rb"^\s*(?:class|namespace|template)\b", data, re.M)
    ):
        return "cpp"
    if language is None:
        shebang = _SHEBANG.match(data)
        return "javascript" if shebang and shebang[1] == b"node" else "python"
    return language
