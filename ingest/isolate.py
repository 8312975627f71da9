"""Parsing in child processes: a file that crashes, hangs or swells a parser costs that file and nothing else.

A child is a plain interpreter that has imported the parsers, and serves one file after another over pipes.
It sees none of this process's settings, no database and no keys, and has no network. It is replaced when it dies,
when it is killed for its time, and after a number of files, so that what leaks in a parser does not add up.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ingest.parser_child import PREFIX, document_of, frame_head
from storage.errors import FileError
from storage.types import ParsedDocument

_PIECE = 1 << 16  # bytes moved at a time
_START_S = 60.0  # a child's time to start, which no file pays for
_LOOK_S = 0.1  # how often a parse that runs is asked whether it is still wanted
_ROOT = Path(__file__).resolve().parent.parent


class ParserPool:
    """Some children, each for one file at a time. Safe for threads; make it after a fork, never before."""

    def __init__(
        self, workers: int = 1, *, wall_s: float = 60, memory_bytes: int = 2 << 30, files_per_child: int = 200
    ) -> None:
        if workers < 1:
            raise ValueError("a parser pool needs at least one worker")
        self._wall_s = wall_s
        self._files = files_per_child
        self._memory = memory_bytes
        self._all = [_Child(wall_s, memory_bytes) for _ in range(workers)]
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        for child in self._all:
            self._idle.put(child)

    def parse(self, data: bytes, name: str, check: Callable[[], None] = lambda: None) -> ParsedDocument:
        """Read one file. Waits for a child to be free. Raises FileError, and whatever `check` raises, which is called
        all the while: then the child is killed."""
        child = self._idle.get()
        try:
            if child.files >= self._files:
                child.stop()
            return child.parse(data, name, check)
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """End the children. Files still being read fail."""
        for child in self._all:
            child.stop()

    def __enter__(self) -> ParserPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parse_isolated(
    data: bytes, name: str, *, wall_s: float = 60, memory_bytes: int = 2 << 30
) -> ParsedDocument:
    """Read one file in a child of its own; for more than a few, keep a `ParserPool`. Raises FileError."""
    with ParserPool(1, wall_s=wall_s, memory_bytes=memory_bytes) as pool:
        return pool.parse(data, name)


class _Child:
    """One child process, started when it is first needed and again after it has gone."""

    def __init__(self, wall_s: float, memory_bytes: int) -> None:
        self.files = 0
        self._wall_s = wall_s
        self._memory = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def parse(self, data: bytes, name: str, check: Callable[[], None]) -> ParsedDocument:
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # it died between two files, which is no fault of this one
        request = {"name": name, "bytes": len(data)}
        answer: dict[str, Any] | None = None
        try:
            process = self._process or self._start(check)
            self.files += 1
            with _nonblocking(process):
                answer = _exchange(process, frame_head(request), data, _Until(time.monotonic() + self._wall_s, check))
        except TimeoutError as error:
            raise FileError(
                f"Reading this file took more than {self._wall_s:g} seconds and was stopped.",
                code="parser_timeout",
            ) from error
        except (OSError, EOFError, ValueError) as error:
            raise FileError("The parser broke down on this file.", code="parser_crash") from error
        finally:
            if answer is None:
                self.stop()
        if "code" in answer:
            raise FileError(answer["message"], code=answer["code"])
        return document_of(answer)

    def _start(self, check: Callable[[], None]) -> subprocess.Popen[bytes]:
        arguments = [str(self._memory), str(self._wall_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ingest.parser_child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            bufsize=0,
        )
        self.files = 0
        with _nonblocking(self._process):
            _answer(self._process, _Until(time.monotonic() + _START_S, check))
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _environment() -> dict[str, str]:
    """What an interpreter needs to start and find this package, and nothing that is secret."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR", "SYSTEMROOT") if key in os.environ}
    return {**kept, "PYTHONPATH": str(_ROOT), "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}


# --- one exchange over the pipes ---


@dataclass(frozen=True)
class _Until:
    """When to give up: at a time, or when `check` raises."""

    deadline: float
    check: Callable[[], None]

    def wait(self, descriptor: int, event: int) -> None:
        """Return once the pipe is ready. Raises TimeoutError, and whatever `check` raises."""
        poll = select.poll()
        poll.register(descriptor, event)
        while True:
            self.check()
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if poll.poll(min(left, _LOOK_S) * 1000):
                return


@contextlib.contextmanager
def _nonblocking(process: subprocess.Popen[bytes]) -> Iterator[None]:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
    yield


def _exchange(process: subprocess.Popen[bytes], head: bytes, data: bytes, until: _Until) -> dict[str, Any]:
    """Send a request and read its answer. Raises TimeoutError, EOFError, OSError, ValueError, and what the check does."""
    assert process.stdin is not None
    for part in (head, data):
        _send(process.stdin.fileno(), memoryview(part), until)
    return _answer(process, until)


def _answer(process: subprocess.Popen[bytes], until: _Until) -> dict[str, Any]:
    """The child's next answer; the first says that it has started. Raises like `_exchange`."""
    assert process.stdout is not None
    read = process.stdout.fileno()
    (length,) = PREFIX.unpack(_receive(read, PREFIX.size, until))
    answer = json.loads(_receive(read, length, until))
    if not isinstance(answer, dict):
        raise ValueError("the child answered with something else than an object")
    return answer


def _send(descriptor: int, view: memoryview, until: _Until) -> None:
    while view:
        until.wait(descriptor, select.POLLOUT)
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(descriptor, view[:_PIECE]) :]


def _receive(descriptor: int, length: int, until: _Until) -> bytes:
    parts: list[bytes] = []
    missing = length
    while missing:
        until.wait(descriptor, select.POLLIN)
        part = os.read(descriptor, min(missing, _PIECE))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
