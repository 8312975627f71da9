"""Zip and tar files, one member at a time, with caps on what is really read: headers are not believed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import IO, Any, BinaryIO, cast

from ingest.office import ends_of, office_kind
from storage.errors import FileError

_HEAD = 512  # bytes that tell whether a file is packed; a tar's first header
_PACKED_HEAD = 1 << 20  # bytes of a packed file in which its first 512 are: bzip2 packs blocks of 900 kB
_PIECE = 1 << 16
_TAR_MAGIC = slice(257, 262)
_TAR_HEADERS = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_XZ_MEMORY = 256 << 20
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_INFLATE: Mapping[bytes, Callable[[], Any]] = MappingProxyType(
    {
        b"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),
        b"BZh": bz2.BZ2Decompressor,
        b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY),
    }
)
_ARCHIVE_MAGIC = (*_ZIP, *_INFLATE, b"7z\xbc\xaf\x27\x1c", b"Rar!")
LONGEST_NAME = 4096  # bytes, as of a path on Linux
_SHOWN_NAME = 200  # characters of one that is longer
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


@dataclass(frozen=True)
class Caps:
    """What an archive may hold. `total_bytes` counts every byte unpacked, skipped ones too."""

    entries: int = 10_000
    total_bytes: int = 1 << 30
    file_bytes: int = 100 << 20


@dataclass(frozen=True)
class Extracted:
    """A file in an archive."""

    path: str
    data: bytes


@dataclass(frozen=True)
class Skipped:
    """A member that was left out, and why."""

    path: str
    reason: str


def is_archive(source: bytes | BinaryIO) -> bool:
    """Whether a file is an archive (one that `expand` opens, or another) and no office file, which is one document.

    A stream is read at its ends only, and stands at its beginning afterwards.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    head = stream.read(_HEAD)
    stream.seek(0)
    packed = head.startswith(_ARCHIVE_MAGIC) or head[_TAR_MAGIC] == b"ustar"
    return packed and office_kind(ends_of(stream)) is None


def opens(archive: bytes) -> bool:
    """Whether an archive is one that `expand` opens: a zip, or a tar, packed or not. Its first MiB says so; one that is damaged
    there may be."""
    if archive.startswith(_ZIP) or archive[_TAR_MAGIC] == b"ustar":
        return True
    inflate = next((make() for magic, make in _INFLATE.items() if archive.startswith(magic)), None)
    if inflate is None:
        return False
    try:
        head = inflate.decompress(archive[:_PACKED_HEAD], _HEAD)
    except _DAMAGED:
        return True
    return len(head) < _HEAD or head[_TAR_MAGIC] == b"ustar"


def expand(source: bytes | BinaryIO, caps: Caps | None = None) -> Iterator[Extracted | Skipped]:
    """The files of an archive in its order, and what was skipped. Holds one file in memory at a time.

    Raises FileError: `archive_limit` over a cap, `invalid_file` if damaged, `unsupported_file` if neither.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    budget = Budget(caps or Caps())
    head = stream.read(_PACKED_HEAD)
    stream.seek(0)
    if not opens(head):
        raise FileError("This is neither a zip nor a tar archive.", code="unsupported_file")
    try:
        if head.startswith(_ZIP):
            yield from _zip(stream, budget)
        else:
            yield from _tar(_unpacked(stream, head, budget), budget)
    except _DAMAGED as error:
        raise FileError("The archive is damaged.", code="invalid_file") from error


class Budget:
    """What is left of the caps."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self._entries = self._bytes = 0
        self._seen: set[str] = set()

    def entry(self) -> None:
        self._entries += 1
        if self._entries > self.caps.entries:
            raise FileError(
                f"The archive holds more than {self.caps.entries} entries; split it.", code="archive_limit"
            )

    def read(self, count: int) -> None:
        self._bytes += count
        if self._bytes > self.caps.total_bytes:
            raise FileError(
                f"The archive unpacks to more than {self.caps.total_bytes} bytes; split it.",
                code="archive_limit",
            )

    def refusal(self, path: str, size: int) -> str:
        """Why a regular file is not taken, from its name and stated size; "" if it is."""
        parts = PurePosixPath(path.replace("\\", "/")).parts
        if not parts or ".." in parts or parts[0] == "/" or parts[0].endswith(":") or "\0" in path:
            return "unsafe path"
        if size > self.caps.file_bytes:
            return f"larger than {self.caps.file_bytes} bytes"
        if path in self._seen:
            return "second file of this name"
        self._seen.add(path)
        return ""


def _drain(stream: IO[bytes], budget: Budget, *, counted: bool) -> bytes:
    """A member's bytes. More than the cap allows means that its header lied."""
    parts: list[bytes] = []
    size = 0
    while part := stream.read(_PIECE):
        size += len(part)
        if counted:
            budget.read(len(part))
        if size > budget.caps.file_bytes:
            raise FileError("A file in the archive is larger than it says.", code="archive_limit")
        parts.append(part)
    return b"".join(parts)


def _cut(path: str) -> Skipped | None:
    """A member whose name is too long to be kept is left out, its name cut."""
    if len(path) <= LONGEST_NAME and len(path.encode("utf-8", "surrogatepass")) <= LONGEST_NAME:
        return None
    return Skipped(path[:_SHOWN_NAME] + "…", "name too long")


# --- zip ---


def _zip(stream: BinaryIO, budget: Budget) -> Iterator[Extracted | Skipped]:
    with zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            budget.entry()
            if not info.filename.endswith("/"):  # zipfile's own question fails on an empty name
                yield _zip_member(archive, info, budget)


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: Budget) -> Extracted | Skipped:
    path = _zip_name(info)
    if (cut := _cut(path)) is not None:
        return cut
    mode = info.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return Skipped(path, "symlink" if stat.S_ISLNK(mode) else "not a regular file")
    if info.flag_bits & 0x1:
        return Skipped(path, "protected by a password")
    if reason := budget.refusal(path, info.file_size):
        return Skipped(path, reason)
    try:
        with archive.open(info) as member:
            return Extracted(path, _drain(member, budget, counted=True))
    except NotImplementedError:
        return Skipped(path, "unsupported compression")
    except _DAMAGED:
        return Skipped(path, "damaged")


def _zip_name(info: zipfile.ZipInfo) -> str:
    """Names without the UTF-8 flag are often UTF-8 all the same."""
    if info.flag_bits & 0x800:
        return info.filename
    try:
        return info.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return info.filename


# --- tar ---


class _TarInfo(tarfile.TarInfo):
    """Long names and extended headers are read into memory whole, at the size they state: cap that."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if self.type in _TAR_HEADERS and self.size > 1 << 20:
            raise FileError("A header in the archive is too large.", code="archive_limit")
        return super()._proc_member(archive)  # type: ignore[misc]


def _tar(stream: BinaryIO, budget: Budget) -> Iterator[Extracted | Skipped]:
    # "r|" reads forward only, in small pieces, through a stream that counts every byte.
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_TarInfo, errorlevel=1) as archive:
        for info in archive:
            budget.entry()
            archive.members.clear()  # type: ignore[attr-defined]  # or each header would be kept
            if not info.isdir():
                yield _tar_member(archive, info, budget)


def _tar_member(archive: tarfile.TarFile, info: tarfile.TarInfo, budget: Budget) -> Extracted | Skipped:
    if (cut := _cut(info.name)) is not None:
        return cut
    if not info.isreg():
        return Skipped(info.name, "symlink" if info.issym() or info.islnk() else "not a regular file")
    if reason := budget.refusal(info.name, info.size):
        return Skipped(info.name, reason)
    member = archive.extractfile(info)
    return Extracted(info.name, _drain(member, budget, counted=False) if member is not None else b"")


def _unpacked(stream: BinaryIO, head: bytes, budget: Budget) -> BinaryIO:
    """The tar stream inside its compression, counted."""
    if head.startswith(b"\x1f\x8b"):
        inner: Any = gzip.GzipFile(fileobj=stream, mode="rb")  # a temporary file says that it can be written
    elif head.startswith(b"BZh"):
        inner = bz2.BZ2File(stream)
    elif head.startswith(b"\xfd7zXZ\0"):
        inner = _Xz(stream)
    else:
        inner = stream
    return cast(BinaryIO, _Counted(inner, budget))


class _Counted:
    """A stream that charges what is read from it to the budget."""

    def __init__(self, inner: Any, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget

    def read(self, size: int) -> bytes:
        part: bytes = self._inner.read(size)
        self._budget.read(len(part))
        return part


class _Xz:
    """xz with a limit on the dictionary that the file may ask for, which lzma.open does not offer."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._inflate = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing and not self._inflate.eof:
            packed = self._stream.read(_PIECE) if self._inflate.needs_input else b""
            part = self._inflate.decompress(packed, max_length=missing)
            if not packed and not part and self._inflate.needs_input:
                raise EOFError("xz stream ends early")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
