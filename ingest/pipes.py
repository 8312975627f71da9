"""What a process and its children for hostile files say to each other: lengths, JSON and bytes over pipes, within a time.

A message is a length (8 bytes, little-endian) and a JSON object; raw bytes may follow, as many as it says. Nothing is
unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import structlog

Child = subprocess.Popen[bytes]
PREFIX = struct.Struct("<Q")
LONGEST = 1 << 30  # bytes of a message: a child's memory holds no longer one
START_S = 60.0  # a child's time to start, which no file pays for
_PIECE = 1 << 16  # bytes moved at a time
_LOOK_S = 0.1  # how often work that runs is asked whether it is still wanted
_ROOT = Path(__file__).resolve().parent.parent
_told: set[str] = set()
log = structlog.get_logger()


def frame_head(value: dict[str, Any]) -> bytes:
    """A JSON object behind its length. Lone surrogates in names survive: JSON escapes them."""
    body = json.dumps(value, separators=(",", ":")).encode("ascii")
    return PREFIX.pack(len(body)) + body


class Until:
    """When to give up: after so many seconds of waiting for the child, or when `check` raises."""

    def __init__(self, seconds: float, check: Callable[[], None]) -> None:
        self._left = seconds
        self._check = check

    def wait(self, descriptor: int, event: int) -> None:
        """Return once the pipe is ready. Raises TimeoutError, and whatever `check` raises."""
        poll = select.poll()
        poll.register(descriptor, event)
        while True:
            self._check()
            if self._left <= 0:
                raise TimeoutError
            begun = time.monotonic()
            ready = poll.poll(min(self._left, _LOOK_S) * 1000)
            self._left -= time.monotonic() - begun
            if ready:
                return


def start(module: str, arguments: Sequence[str], stdin: int | IO[bytes], check: Callable[[], None]) -> Child:
    """A child that has started: a plain interpreter, without this process's settings and secrets, without a network.

    Raises TimeoutError, EOFError, OSError, ValueError, and what `check` does.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(), bufsize=0,
    )  # fmt: skip
    try:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        _tell(answer(process, Until(START_S, check)))
    except BaseException:
        stop(process)
        raise
    return process


def stop(process: Child) -> None:
    """End a child, whatever it is at."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _tell(started: dict[str, Any]) -> None:
    """Say once, where the system does not keep a child from the network, that only Python does."""
    if started.get("network_cut") is not True and "network" not in _told:
        _told.add("network")
        log.warning("parser_network_not_enforced", what="this system lets native code in a parser open sockets")


def environment() -> dict[str, str]:
    """What an interpreter needs to start and find this package, and nothing that is secret."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR", "SYSTEMROOT") if key in os.environ}
    return {**kept, "PYTHONPATH": str(_ROOT), "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def answer(process: Child, until: Until, longest: int = LONGEST) -> dict[str, Any]:
    """The child's next message, of no more than `longest` bytes; the first says that it has started. Raises TimeoutError,
    EOFError, OSError, ValueError, and what the check does."""
    (length,) = PREFIX.unpack(receive(process, PREFIX.size, until))
    if length > longest:
        raise ValueError("the child's message is too long")
    value = json.loads(receive(process, length, until))
    if not isinstance(value, dict):
        raise ValueError("the child answered with something else than an object")
    return value


def send(process: Child, data: bytes, until: Until) -> None:
    """Give the child bytes. Raises like `answer`."""
    assert process.stdin is not None
    descriptor, view = process.stdin.fileno(), memoryview(data)
    while view:
        until.wait(descriptor, select.POLLOUT)
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(descriptor, view[:_PIECE]) :]


def receive(process: Child, length: int, until: Until) -> bytes:
    """So many of the child's bytes. Raises like `answer`."""
    assert process.stdout is not None
    parts: list[bytes] = []
    missing = length
    while missing:
        until.wait(process.stdout.fileno(), select.POLLIN)
        part = os.read(process.stdout.fileno(), min(missing, _PIECE))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
