"""Archives are unpacked in a child process of their own: one that loops, crashes it or swells costs that archive only.

The child reads the archive's file itself and sends one member at a time, so that neither process holds more than one. It
has no network, its memory and its CPU time are limited, and the time that is waited for it is too.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from ingest import pipes
from ingest.archive import LONGEST_NAME, Budget, Caps, Extracted, Skipped
from ingest.encoding import is_storable, storable
from storage.errors import FileError

WALL_S = 300.0  # of waiting for the child, over the whole archive: a full one of 1 GiB takes about one
_LONGEST_MESSAGE = 6 * LONGEST_NAME + 4096  # bytes: a name as JSON escapes it, and a reason
MEMORY_BYTES = 1 << 30  # a member of 100 MiB twice, and the largest dictionary of xz


def expand_isolated(
    source: BinaryIO, name: str, check: Callable[[], None] = lambda: None, caps: Caps | None = None
) -> Iterator[Extracted | Skipped]:
    """As `archive.expand`, in a child. `check` is called all the while.

    Raises FileError, also `parser_timeout` and `parser_crash`, and whatever `check` raises: then the child is killed.
    """
    caps = caps or Caps()
    with _file(source) as archive:
        limits = (MEMORY_BYTES, int(WALL_S) + 1, caps.entries, caps.total_bytes, caps.file_bytes)
        try:
            child = pipes.start("ingest.archive_child", list(map(str, limits)), archive, check)
        except (OSError, EOFError, ValueError) as error:
            raise _crash(name) from error
        try:
            yield from _members(child, name, pipes.Until(WALL_S, check), Budget(caps))
        finally:
            pipes.stop(child)


def _file(source: BinaryIO) -> BinaryIO:
    """The source as a file of the system, which a child can read: another name for it, or a copy."""
    source.seek(0)  # which also writes what has not been written yet
    try:
        return open(source.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:
        copy = tempfile.TemporaryFile()
        shutil.copyfileobj(source, copy)
        copy.seek(0)
        return cast(BinaryIO, copy)


def _members(child: pipes.Child, name: str, until: pipes.Until, budget: Budget) -> Iterator[Extracted | Skipped]:
    while True:
        try:
            message = pipes.answer(child, until, _LONGEST_MESSAGE)
            if "code" in message:
                raise FileError(f"{name}: {message['message']}", code=str(message["code"]))
            if "end" in message:
                return
            path, part = str(message["path"]), None
            budget.entry()  # before anything is taken: a child that has been taken over may say anything
            if "reason" not in message:
                size = int(message["bytes"])
                budget.read(size)
                part = Extracted(path, pipes.receive(child, size, until))
        except TimeoutError as error:
            raise FileError(
                f"{name}: reading this archive took more than {WALL_S:g} seconds and was stopped.", code="parser_timeout"
            ) from error
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise _crash(name) from error
        yield _named(part or Skipped(path, str(message["reason"])))


def _named(part: Extracted | Skipped) -> Extracted | Skipped:
    """A member whose name is text in no encoding, or holds a NUL, can be neither stored nor asked for."""
    return part if is_storable(part.path) else Skipped(storable(part.path), "its name is not text")


def _crash(name: str) -> FileError:
    return FileError(f"{name}: the reader of archives broke down on this file.", code="parser_crash")
