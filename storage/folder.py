"""Objects as files. A file is written apart, made durable, then renamed: seen whole or not at all.

The object `a/b/leaf` is the file `a/b/=5f/leaf`, 5f being a digest of the leaf, so that no folder
grows too large. `=` is in no object name: a folder of the fan-out never meets a folder of a name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path

from storage.errors import ObjectMissing, StorageUnavailable
from storage.names import check_name, check_prefix, is_name
from storage.types import ObjectInfo

STALE_SECONDS = 3600.0  # a writer that has not touched its file for an hour is dead
_TEMP = ".writing"
_ABSENT = (FileNotFoundError, NotADirectoryError)
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


class _Taken(Exception):
    """There is an object of this name."""


class FolderStore:
    """An ObjectStore in a folder of a local or network file system; any number of processes may share it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Creates the folder if need be, removes leftovers of dead writers. Raises StorageUnavailable."""
        self._root = Path(root)
        self._temp = self._root / _TEMP
        with _mapped("open", str(root)):
            self._temp.mkdir(parents=True, exist_ok=True)
        self.sweep()

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """See ObjectStore. Durable on return: file and folder entries are synced."""
        return self._put(name, parts, os.replace)

    def put_new(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """See ObjectStore. A file system without hard links may let two writers believe that they were first."""
        try:
            self._put(name, parts, _link_new)
        except _Taken:
            return False
        return True

    def _put(self, name: str, parts: Sequence[bytes | memoryview], place: Callable[[Path, Path], None]) -> int:
        target = self._path(name)
        temp = self._temp / f"{os.getpid()}-{uuid.uuid4().hex}"  # never shared, whoever else writes this name
        with _mapped("put", name):
            try:
                written = _write_synced(temp, parts)
                self._make_folders(target.parent)
                place(temp, target)
                _sync_folder(target.parent)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)
        return written

    def size(self, name: str) -> int | None:
        """See ObjectStore."""
        path = self._path(name)
        with _mapped("size", name):
            try:
                return os.stat(path).st_size
            except _ABSENT:
                return None

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """See ObjectStore. Reads straight into `buffer`."""
        with self._open(name) as file:
            return _fill(file, buffer, offset)

    def read_all(self, name: str, allocate: Callable[[int], memoryview]) -> int:
        """See ObjectStore. What is written over it meanwhile is the same bytes."""
        size = self.size(name)
        if size is None:
            raise ObjectMissing(f"no object {name}")
        return self.read_into(name, allocate(size))

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[FileIO]:
        path = self._path(name)
        with _mapped("read", name):
            try:
                file = FileIO(path)
            except _ABSENT:
                raise ObjectMissing(f"no object {name}") from None
            with file:
                yield file

    def delete(self, name: str) -> bool:
        """See ObjectStore. Durable on return."""
        path = self._path(name)
        with _mapped("delete", name):
            try:
                os.unlink(path)
            except _ABSENT:
                return False
            _sync_folder(path.parent)
        return True

    def delete_many(self, names: Sequence[str]) -> dict[str, str]:
        """See ObjectStore."""
        left: dict[str, str] = {}
        for name in names:
            try:
                self.delete(name)
            except StorageUnavailable as error:
                left[name] = str(error)
        return left

    def entries(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ObjectStore. In no particular order."""
        for name in self.list(prefix):
            with _mapped("list", name):
                try:
                    found = os.stat(self._path(name))
                except _ABSENT:
                    continue  # deleted since it was listed
            yield ObjectInfo(name, found.st_size, found.st_mtime)

    def list(self, prefix: str) -> Iterator[str]:
        """See ObjectStore. In no particular order."""
        start = self._root / check_prefix(prefix).rpartition("/")[0]
        with _mapped("list", prefix):
            for folder, folders, files in os.walk(start, onerror=_raise_unless_absent):
                folders[:] = [each for each in folders if not each.startswith(".")]
                parent = Path(folder)
                if not parent.name.startswith("="):
                    continue
                base = parent.parent.relative_to(self._root).as_posix()
                names = (leaf if base == "." else f"{base}/{leaf}" for leaf in files)
                yield from (name for name in names if name.startswith(prefix) and is_name(name))

    def sweep(self, older_than_s: float = STALE_SECONDS) -> int:
        """Removes unfinished files of writers that died; the number removed. Raises StorageUnavailable."""
        removed, limit = 0, time.time() - older_than_s
        with _mapped("sweep", _TEMP), os.scandir(self._temp) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # its writer, or another sweep, was faster
                    if entry.stat(follow_symlinks=False).st_mtime <= limit:
                        os.unlink(entry.path)
                        removed += 1
        return removed

    def counters(self) -> dict[str, int]:
        """See ObjectStore: a folder counts nothing."""
        return {}

    def _path(self, name: str) -> Path:
        folder, _, leaf = check_name(name).rpartition("/")
        return self._root / folder / f"={zlib.crc32(leaf.encode()) & 0xFF:02x}" / leaf

    def _make_folders(self, folder: Path) -> None:
        """Like mkdir -p below the root, each entry synced. Never the root itself: it may be a lost mount."""
        if folder == self._root or folder.is_dir():
            return
        self._make_folders(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        _sync_folder(folder.parent)


def _write_synced(path: Path, parts: Sequence[bytes | memoryview]) -> int:
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _link_new(temp: Path, target: Path) -> None:
    """Raises _Taken where there is such a file."""
    try:
        os.link(temp, target)
    except FileExistsError:
        raise _Taken from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.exists():
            raise _Taken from None
        os.replace(temp, target)


def _fill(file: FileIO, buffer: memoryview, offset: int) -> int:
    done = 0
    file.seek(offset)
    while done < len(buffer) and (count := file.readinto(buffer[done:])):
        done += count
    return done


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, _ABSENT):
        raise error


@contextlib.contextmanager
def _mapped(action: str, name: str) -> Iterator[None]:
    """The one place where the file system's errors become ours."""
    try:
        yield
    except OSError as error:
        raise StorageUnavailable(f"object folder: {action} {name}: {error.strerror}") from error
