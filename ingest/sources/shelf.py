"""Files fetched one by one from a server: tried again in its trouble, kept in a folder until they were read."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingest.fetch import Answer, Fetcher, FetchFailed
from ingest.sources.scratch import fresh_folder
from ingest.sources.types import FILE_BYTES, Asker, Entry, Left, Reach, Seen, refusal
from storage.breaker import Breaker
from storage.errors import FileError, PrereadError
from storage.retry import DeadlinePassed, Retry

ATTEMPTS = 3
SECONDS = 300.0  # for one file, all attempts together
TOGETHER = 16 << 30  # bytes of all files that one listing fetches: they lie on our disk until they are read
_TROUBLE = (408, 425, 429, 500, 502, 503, 504)


def _is_trouble(error: Exception) -> bool:
    return isinstance(error, FetchFailed) and error.retryable


@dataclass
class Got:
    """An answer with its whole body."""

    answer: Answer
    body: bytes

    @property
    def tag(self) -> str:
        """What the server calls this content; empty if it gives it no name."""
        headers = self.answer.headers
        return headers.get("etag") or headers.get("last-modified", "")


class Shelf:
    """One listing's files. `entries`, `skipped` and `seen` grow as files are offered."""

    def __init__(self, reach: Reach, asker: Asker, cap: int = FILE_BYTES) -> None:
        self._fetcher, self._reach, self._asker, self._cap = Fetcher(reach.hosts), reach, asker, cap
        self._retry = Retry(_is_trouble, Breaker(), attempts=ATTEMPTS, deadline_s=SECONDS)
        self._folder: Path | None = None
        self._held = 0  # bytes in the folder
        self.entries: dict[str, Entry] = {}
        self.skipped: list[Left] = []
        self.seen: dict[str, Seen] = {}

    def get(self, url: str, headers: Mapping[str, str] | None = None, max_bytes: int | None = None) -> Got:
        """A 200 or 304. Raises FetchFailed, HostRefused, StorageUnavailable (the server was in trouble just now)."""

        if self._held >= TOGETHER:
            raise FetchFailed(f"one sync fetches {TOGETHER} bytes at most; the next goes on", retryable=False)

        def attempt(end: float) -> Got:
            self._asker.check()
            body = bytearray()
            answer = self._fetcher.get(
                url, body.extend, max_bytes=self._cap if max_bytes is None else max_bytes,
                seconds=max(0.0, end - time.monotonic()), headers=headers,
            )  # fmt: skip
            if answer.status not in (200, 304):
                raise FetchFailed(f"the server answered {answer.status}", retryable=answer.status in _TROUBLE)
            return Got(answer, bytes(body))

        try:
            return self._retry.run(attempt)
        except DeadlinePassed:
            raise FetchFailed("the server took too long") from None

    def known(self, path: str, seen: Seen) -> None:
        """Take a file as it was the last time."""
        self.seen[path] = seen
        if seen.refusal:
            self.skipped.append(Left(path, seen.refusal))
        else:
            self.entries[path] = Entry(path, seen.sha256, seen.bytes)

    def put(self, path: str, tag: str, data: bytes) -> None:
        """Take a file that was fetched now."""
        reason, digest = refusal(path, data), hashlib.sha256(data).hexdigest()
        if tag:
            self.seen[path] = Seen(tag, digest, len(data), reason)
        if reason:
            self.skipped.append(Left(path, reason))
            return
        self._folder = self._folder or fresh_folder(self._reach.scratch)
        (self._folder / digest).write_bytes(data)
        self._held += len(data)
        self.entries[path] = Entry(path, digest, len(data))

    def failed(self, path: str, error: PrereadError) -> None:
        """Leave a file out that is there but could not be fetched. It stays known as it was."""
        if isinstance(error, FileError) and error.code == "too_large":
            self.skipped.append(Left(path, f"larger than {self._cap} bytes"))
            return
        self.skipped.append(Left(path, f"cannot be read: {error}", unread=True))
        if path in self._asker.seen:
            self.seen[path] = self._asker.seen[path]

    def kept(self, path: str) -> bytes | None:
        """The bytes of a file that was fetched now."""
        entry = self.entries.get(path)
        if entry is None:
            raise FileError(f"{path!r} is not among the source's files.", code="invalid_file")
        file = None if self._folder is None else self._folder / entry.sha256
        return file.read_bytes() if file is not None and file.exists() else None

    def same(self, path: str, data: bytes) -> bytes:
        """The bytes, if they are still those that were listed. Raises FileError."""
        if hashlib.sha256(data).hexdigest() != self.entries[path].sha256:
            raise FileError(f"{path!r} has changed since it was listed.", code="storage_error", retryable=True)
        return data

    def close(self) -> None:
        self._fetcher.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
