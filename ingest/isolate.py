"""Parsing in child processes: a file that crashes, hangs or swells a parser costs that file and nothing else.

A child is a plain interpreter that has imported the parsers, and serves one file after another over pipes.
It sees none of this process's settings, no database and no keys, and has no network. It is replaced when it dies,
when it is killed for its time, and after a number of files, so that what leaks in a parser does not add up.
"""

from __future__ import annotations

import queue
import subprocess
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ingest import pipes
from ingest.parser_child import document_of
from storage.errors import FileError
from storage.types import ParsedDocument


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
        request = pipes.frame_head({"name": name, "bytes": len(data)})
        answer: dict[str, Any] | None = None
        try:
            if self._process is None:
                self._process = pipes.start("ingest.parser_child", [str(self._memory), str(self._wall_s)], subprocess.PIPE, check)
                self.files = 0
            self.files += 1
            until = pipes.Until(self._wall_s, check)
            for part in (request, data):
                pipes.send(self._process, part, until)
            answer = pipes.answer(self._process, until)
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

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            pipes.stop(process)
