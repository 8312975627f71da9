"""Bytes to text: byte order mark, strict UTF-8, UTF-16 without a mark, a detector, GB 18030, or a refusal."""

from __future__ import annotations

import codecs
import re
import unicodedata

from charset_normalizer import from_bytes

from storage.errors import FileError

# UTF-32 first: its little-endian mark begins with the one of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_UNMARKED_WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
# Encodings found in the wild. Without a list the detector answers short texts with EBCDIC and the like.
_CANDIDATES = [
    "cp1252", "gb18030", "big5", "cp932", "euc_jp", "cp949", "cp1251", "koi8_r", "cp1250", "iso8859_2",
    "cp1253", "cp1254", "cp1255", "cp1256", "cp1257",
]  # fmt: skip
_SAMPLE = 4096  # characters looked at when judging a guess
_DETECT = 256 * 1024  # bytes shown to the detector
_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def decode(data: bytes, declared: str | None = None) -> str:
    """The text of `data`, without its byte order mark and with `\\n` for `\\r\\n`. Raises FileError.

    `declared` is what the document itself says (an HTML meta element): tried after UTF-8, before any guess.
    """
    return _decode(data, declared).replace("\r\n", "\n")


def _decode(data: bytes, declared: str | None) -> str:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            text = _strict(data[len(mark) :], encoding)
            if text is not None:
                return text
    if b"\x1b$" in data and (text := _strict(data, "iso2022_jp")) is not None:
        return text  # it is ASCII but for its escapes, which no other text has
    text = _strict(data, "utf-8")
    if text is not None and "\0" not in text:
        return text
    wide = unmarked_wide(data)
    if wide is not None:
        text = _strict(data, wide)
    elif text is None:
        text = _declared(data, declared) or _detected(data) or _plausible(_strict(data, "gb18030"))
    if text is None:
        raise FileError(
            "The text encoding could not be recognised; save the file as UTF-8 and send it again.",
            code="encoding_unknown",
        )
    return text


def is_storable(text: str) -> bool:
    """Whether databases take it: it holds no NUL and no half of a surrogate pair."""
    try:
        return "\0" not in text and (text.isascii() or bool(text.encode()))
    except UnicodeEncodeError:
        return False


def storable(text: str) -> str:
    """The text with one sign for each character that no database takes, so that places in it stay what they are."""
    return text if is_storable(text) else _UNSTORABLE.sub("\ufffd", text)


def unmarked_wide(data: bytes) -> str | None:
    """UTF-16 or UTF-32 without a byte order mark, given away by the NULs of its ASCII characters."""
    head = data[:_SAMPLE]
    if b"\0" not in head or _has_stray_nuls(head):
        return None
    found = [(sample, encoding) for encoding in _UNMARKED_WIDE if (sample := _sample(data, encoding))]
    # Read the wrong way round, ASCII turns into rare but real characters: more of it is right.
    best = max(found, key=lambda pair: sum(map(str.isascii, pair[0])) / len(pair[0]), default=None)
    return best[1] if best is not None else None


def _has_stray_nuls(head: bytes) -> bool:
    """Whether it is sound 8-bit text but for a few NULs. Of wide ASCII half is NUL or more, and wide letters of other scripts
    leave control characters or broken UTF-8."""
    rest = head.replace(b"\0", b"")
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(rest)
    return 4 * (len(head) - len(rest)) < len(head) and "\ufffd" not in text and _CONTROL.search(text) is None


def _sample(data: bytes, encoding: str) -> str:
    """The beginning of `data` read in this encoding; "" if it makes no text."""
    width = 2 if "16" in encoding else 4
    if len(data) % width:
        return ""
    # A sample may end inside a surrogate pair: an incremental decoder leaves such a half undecoded.
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    try:
        sample = decoder.decode(data[: min(len(data), _SAMPLE)])
    except UnicodeDecodeError:
        return ""
    return sample if all(map(_is_ordinary, sample)) and _is_uniform(sample) else ""


def _is_ordinary(character: str) -> bool:
    return character in "\t\n\r\f" or unicodedata.category(character) not in {"Cc", "Cn", "Co", "Cs"}


def _is_uniform(sample: str) -> bool:
    """Text keeps to a few of Unicode's 256-character rows; misread bytes scatter over many."""
    rows = {ord(character) >> 8 for character in sample if not 0x3000 <= ord(character) < 0xD800}
    return len(rows) <= 8 + len(sample) // 64


def _strict(data: bytes, encoding: str) -> str | None:
    try:
        return data.decode(encoding)
    except (UnicodeDecodeError, LookupError):
        return None


def _declared(data: bytes, declared: str | None) -> str | None:
    return _plausible(_strict(data, declared)) if declared else None


def _detected(data: bytes) -> str | None:
    best = from_bytes(data[:_DETECT], cp_isolation=_CANDIDATES).best()
    return _plausible(_strict(data, best.encoding)) if best is not None else None


def _plausible(text: str | None) -> str | None:
    """A guess that yields control characters is a wrong guess."""
    return None if text is None or _CONTROL.search(text) else text
