"""Reading from S3 with nothing in between: kept-alive http.client connections, signed URLs, the caller's own memory."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import re
import socket
import ssl
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, cast
from urllib.parse import urlsplit

from storage.retry import DeadlinePassed

MAX_IDLE = 32  # connections kept per server
_MAX_ERROR = 1 << 16  # bytes of an error's body that are looked at
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Refused(Exception):
    """The server answered with an error. `code` is S3's name for it, or else the status."""

    def __init__(self, status: int, code: str, date: str | None = None) -> None:
        super().__init__(code)
        self.status, self.code, self.date = status, code, date


class Misanswered(ConnectionError):
    """The answer is not to what was asked: another range, another length, another object's middle."""


@dataclass(frozen=True)
class Got:
    """`count` bytes are in the buffer, of the object's version `etag`, which has `total`."""

    count: int
    etag: str
    total: int


class S3Http:
    """GET and HEAD of signed URLs. Safe to share between threads.

    `idle_s` bounds the wait for the next byte. Every call has an `end` on the monotonic clock, which holds for slow
    bytes too. Raises Refused, OSError (DeadlinePassed among them) and http.client.HTTPException.
    """

    def __init__(self, connect_s: float, idle_s: float) -> None:
        self._connect_s, self._idle_s = connect_s, idle_s
        self._idle: defaultdict[tuple[str, str], list[_Connection]] = defaultdict(list)
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        weakref.finalize(self, _close_all, self._idle)  # also where nobody calls `close`

    def size(self, url: str, end: float) -> int:
        """The object's size, by HEAD."""
        with self._answer("HEAD", url, None, end) as answer:
            answer.read()  # nothing, but the connection is free only then
            if answer.status != 200 or answer.getheader("Content-Length") is None:
                raise _refused(answer, b"")
            return int(answer.getheader("Content-Length", ""))

    def get(self, url: str, buffer: memoryview, offset: int, end: float) -> Got:
        """The bytes from `offset` on into `buffer`, in place; fewer where the object ends."""
        with self._answer("GET", url, (offset, len(buffer)), end) as answer:
            if answer.status == 416:
                answer.read(_MAX_ERROR)
                return Got(0, "", 0)  # the object ends before `offset`
            if answer.status == 200 and not offset and int(answer.getheader("Content-Length") or -1) >= len(buffer):
                return _fill(answer, buffer, len(buffer))  # a server that knows no ranges
            count, total = _promised(answer, offset, len(buffer))
            return _fill(answer, buffer[:count], total)

    def get_first(self, url: str, most: int, allocate: Callable[[int], memoryview], end: float) -> tuple[Got, memoryview]:
        """Up to `most` bytes from the start on, into what `allocate` gives for the whole object; and that."""
        with self._answer("GET", url, (0, most), end) as answer:
            if answer.status == 416:
                answer.read(_MAX_ERROR)
                return Got(0, "", 0), allocate(0)  # empty
            count, total = _promised(answer, 0, most)
            buffer = allocate(total)
            return _fill(answer, buffer[:count], total), buffer

    def close(self) -> None:
        """Closes the connections that nobody uses."""
        with self._lock:
            _close_all(self._idle)

    @contextlib.contextmanager
    def _answer(
        self, method: str, url: str, wanted: tuple[int, int] | None, end: float
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer's head; its connection is kept if the body has been read to its end. `wanted`: offset, length."""
        where = urlsplit(url)
        origin = where.scheme, where.netloc
        headers = {"Accept-Encoding": "identity"} | _range(wanted)
        connection, answer = self._ask(origin, method, f"{where.path}?{where.query}", headers, end)
        healthy = False
        try:
            yield answer
            healthy = True
        except Refused:
            healthy = True
            raise
        finally:
            self._keep(origin, connection, answer, healthy)

    def _keep(
        self, origin: tuple[str, str], connection: _Connection, answer: http.client.HTTPResponse, healthy: bool
    ) -> None:
        with self._lock:
            if healthy and answer.isclosed() and connection.is_open and len(self._idle[origin]) < MAX_IDLE:
                self._idle[origin].append(connection)
                return
        answer.close()
        connection.close()

    def _ask(
        self, origin: tuple[str, str], method: str, target: str, headers: dict[str, str], end: float
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        while True:
            with self._lock:
                kept = self._idle[origin].pop() if self._idle[origin] else None
            connection = kept or _Connection(*origin, self._context(origin[0]), self._idle_s)
            try:
                return connection, connection.ask(method, target, headers, min(self._connect_s, _left(end)), end)
            except BaseException as error:
                connection.close()
                # A kept connection that the server has closed meanwhile says nothing about the server.
                if kept is None or not isinstance(error, ConnectionError):
                    raise

    def _context(self, scheme: str) -> ssl.SSLContext | None:
        """The system's certificates, or AWS_CA_BUNDLE's, which boto3 reads too."""
        with self._lock:
            if scheme == "https" and self._tls is None:
                self._tls = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
            return self._tls


def _close_all(idle: dict[tuple[str, str], list[_Connection]]) -> None:
    for connections in idle.values():
        while connections:
            connections.pop().close()


def _range(wanted: tuple[int, int] | None) -> dict[str, str]:
    return {} if wanted is None else {"Range": f"bytes={wanted[0]}-{wanted[0] + wanted[1] - 1}"}


def _promised(answer: http.client.HTTPResponse, offset: int, asked: int) -> tuple[int, int]:
    """How many bytes of the range the answer brings, and of how many. Raises Refused, or Misanswered if it brings
    something else: an error's text in a 200 is no range."""
    if answer.status not in (200, 206):
        raise _refused(answer, answer.read(_MAX_ERROR))
    found = _RANGE.fullmatch(answer.getheader("Content-Range", ""))
    if answer.status == 200 or found is None:
        raise Misanswered("the server ignored the range")
    first, last, total = map(int, found.groups())
    length = int(answer.getheader("Content-Length") or -1)
    if first != offset or last - first + 1 != length or length != min(asked, total - offset):
        raise Misanswered("another range than was asked for")
    return length, total


def _fill(answer: http.client.HTTPResponse, buffer: memoryview, total: int) -> Got:
    done = 0
    while done < len(buffer):
        if not (count := answer.readinto(buffer[done:])):
            raise ConnectionError("the body ended early")
        done += count
    return Got(done, answer.getheader("ETag", ""), total)


def _refused(answer: http.client.HTTPResponse, body: bytes) -> Refused:
    code = _CODE.search(body)
    return Refused(answer.status, code[1].decode() if code else str(answer.status), answer.getheader("Date"))


def seconds_ahead(date: str | None) -> float:
    """How far this machine's clock is ahead of a server that has sent this Date header; 0 if it sent none."""
    try:
        return time.time() - parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return 0.0


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise DeadlinePassed("the deadline has passed")
    return left


# --- one connection ----------------------------------------------------------------------------------------


class _Connection:
    """An http.client connection on whose socket every single read and write ends in time."""

    def __init__(self, scheme: str, netloc: str, tls: ssl.SSLContext | None, idle_s: float) -> None:
        self._idle_s = idle_s
        if scheme == "https":
            self.http: http.client.HTTPConnection = http.client.HTTPSConnection(netloc, context=tls)
        else:
            self.http = http.client.HTTPConnection(netloc)
        self._timed: _Timed | None = None

    def ask(
        self, method: str, target: str, headers: dict[str, str], connect_s: float, end: float
    ) -> http.client.HTTPResponse:
        if self._timed is None:
            self.http.timeout = connect_s
            self.http.connect()
            self._timed = _Timed(self.http.sock, self._idle_s)
            self.http.sock = cast("socket.socket", self._timed)
        self._timed.end = end
        self.http.request(method, target, headers=headers)
        return self.http.getresponse()

    @property
    def is_open(self) -> bool:
        return self.http.sock is not None

    def close(self) -> None:
        self.http.close()


class _Timed:
    """What http.client uses of a socket: `sendall`, `makefile` and `close`, none of which outlasts `end`."""

    def __init__(self, sock: socket.socket, idle_s: float) -> None:
        self.sock, self.idle_s, self.end = sock, idle_s, 0.0
        self._timeout = 0.0
        self._files, self._closed = 0, False

    def hurry(self) -> None:
        """Nothing is waited for past `idle_s` or `end` by the next call. Setting it is a call to the system of its own, which far
        from the end is the same each time."""
        if (timeout := min(self.idle_s, _left(self.end))) != self._timeout:
            self.sock.settimeout(timeout)
            self._timeout = timeout

    def sendall(self, data: Any) -> None:
        self.hurry()
        self.sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        self._files += 1
        return io.BufferedReader(_Raw(self))

    def close(self) -> None:
        """Like a socket's: it stays open for the files made of it."""
        self._closed = True
        self._drop()

    def file_closed(self) -> None:
        self._files -= 1
        self._drop()

    def _drop(self) -> None:
        if self._closed and self._files <= 0:
            self.sock.close()


class _Raw(io.RawIOBase):
    def __init__(self, timed: _Timed) -> None:
        self._timed: _Timed | None = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        timed = self._timed
        assert timed is not None
        timed.hurry()
        return timed.sock.recv_into(buffer)

    def close(self) -> None:
        timed, self._timed = self._timed, None
        if timed is not None:
            timed.file_closed()
        super().close()
