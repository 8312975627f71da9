"""A folder on this machine as a source."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ingest.sources.types import FILE_BYTES, Entry, Left, Seen, checked
from storage.errors import FileError, UserError


class FolderSource:
    """The files under a folder. Symlinks are never followed."""

    def __init__(
        self, path: str | Path, *, file_bytes: int = FILE_BYTES, check: Callable[[], None] = lambda: None
    ) -> None:
        self._root = os.fspath(path)
        self._cap, self._check = file_bytes, check
        self.skipped: list[Left] = []
        self.seen: dict[str, Seen] = {}
        if not os.path.isdir(self._root):
            raise UserError(f"There is no folder {self._root!r}.")

    def manifest(self) -> list[Entry]:
        """See Source. Raises FileError for a folder that cannot be listed."""
        self.skipped = []
        entries = [entry for path in self._walk() if (entry := self._entry(path)) is not None]
        return sorted(entries, key=lambda entry: entry.path)

    def read(self, path: str) -> bytes:
        """The bytes of a file of the manifest. Raises FileError if it is gone or no longer a plain file."""
        parts = path.split("/")
        if not path or path.startswith("/") or ".." in parts or "\0" in path:
            raise FileError(f"{path!r} is not a path inside the folder.", code="invalid_file")
        try:
            return _read_plain(self._root, parts, self._cap)
        except OSError as error:
            raise FileError(f"{path!r} cannot be read: {error.strerror}.", code="invalid_file") from error

    def close(self) -> None:
        """See Source."""

    def _walk(self) -> Iterator[str]:
        stack = [""]
        while stack:
            folder = stack.pop()
            try:
                found = list(os.scandir(os.path.join(self._root, folder)))
            except OSError as error:
                if not folder:
                    raise FileError(
                        f"the folder {self._root!r} cannot be listed: {error.strerror}", code="storage_error", retryable=True
                    ) from error
                self.skipped.append(Left(folder, f"cannot be listed: {error.strerror}", unread=True))
                continue
            for item in found:
                path = f"{folder}/{item.name}" if folder else item.name
                if item.is_symlink():
                    self.skipped.append(Left(path, "symlink"))
                elif item.name == ".git":
                    self.skipped.append(Left(path, "git's own files"))
                elif item.is_dir(follow_symlinks=False):
                    stack.append(path)
                elif item.is_file(follow_symlinks=False):
                    yield path
                else:
                    self.skipped.append(Left(path, "not a regular file"))

    def _entry(self, path: str) -> Entry | None:
        self._check()
        try:
            data = _read_plain(self._root, path.split("/"), self._cap)
        except FileError:
            self.skipped.append(Left(path, f"larger than {self._cap} bytes"))
            return None
        except OSError as error:
            self.skipped.append(Left(path, f"cannot be read: {error.strerror}", unread=True))
            return None
        return checked(path, data, self.skipped)


def _read_plain(root: str, parts: list[str], cap: int) -> bytes:
    """A file's bytes, opening each folder on the way without following links: none can be slipped in."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Without O_NONBLOCK a named pipe would hold us here for ever.
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        data = file.read(cap + 1)
    if len(data) > cap:
        raise FileError(f"The file is larger than {cap} bytes.", code="too_large")
    return data
