"""What a source is: it lists its files with their hashes, then gives them one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ingest.archive import is_archive, opens
from ingest.detect import is_binary, stands_for_another
from ingest.egress import AllowedHosts

FILE_BYTES = 100 << 20


@dataclass(frozen=True)
class Entry:
    """A file on offer. `path` is relative with `/`; undecodable bytes in it are kept as lone surrogates."""

    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Left:
    """A file or folder left out, and why. `unread`: it is there, or may be; what is known of it stays."""

    path: str
    reason: str
    unread: bool = False


@dataclass(frozen=True)
class Seen:
    """What a path held when it was last fetched. `tag`: the server's word for that content, e.g. its ETag. `refusal`: why it
    is no document, if it is none."""

    tag: str
    sha256: str
    bytes: int
    refusal: str = ""


@dataclass(frozen=True)
class Reach:
    """What the operator lets sources read: folders, hosts, and with which credentials. `scratch`: a folder for what has
    been fetched and is being read."""

    roots: Sequence[str] = ()
    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    credentials: Path = Path("credentials")
    scratch: Path = Path("scratch")


@dataclass(frozen=True)
class Asker:
    """For whom a source is read. `seen`: by path, what was found there the last time. `check` raises Cancelled."""

    tenant_id: str
    seen: Mapping[str, Seen] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None


class Source(Protocol):
    """Made of a corpus's words without reading anything, so that wrong words are refused at once.

    A source that cannot be listed as a whole raises: what it does not list is deleted. `seen`: what the next listing is to be
    told, empty where it would not help."""

    skipped: list[Left]
    seen: dict[str, Seen]

    def manifest(self) -> list[Entry]:
        """All files in order of their paths; afterwards `skipped` says what was left out. Raises UserError."""
        ...

    def read(self, path: str) -> bytes:
        """The bytes of a file of the manifest. Raises FileError."""
        ...

    def close(self) -> None:
        """Drop what was fetched."""
        ...


def refusal(path: str, data: bytes) -> str:
    """Why a file with this content is no document; empty if it may be one."""
    if is_archive(data):
        return "" if opens(data) else "an archive that is neither zip nor tar"
    return "binary" if is_binary(data) else stands_for_another(path, data)


def checked(path: str, data: bytes, skipped: list[Left]) -> Entry | None:
    """The entry for a file's bytes, or None and the reason among `skipped`."""
    if reason := refusal(path, data):
        skipped.append(Left(path, reason))
        return None
    return Entry(path, hashlib.sha256(data).hexdigest(), len(data))
