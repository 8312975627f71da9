"""A narrow way to stored bytes: reads of a folder, or connections to a server, held to a bandwidth that all share, or stalled."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from types import TracebackType
from urllib.parse import urlsplit

from storage.errors import UserError
from storage.folder import FolderStore

STALLED = 0.0
PART = 1 << 20
PIECE = 1 << 16


class Gate:
    """Lets `bytes_per_s` through, of all who ask together. STALLED: nothing, until `open`."""

    def __init__(self, bytes_per_s: float) -> None:
        self.rate = bytes_per_s
        self._opened = threading.Event()
        self._free_at, self._lock = 0.0, threading.Lock()

    def open(self) -> None:
        """Nobody waits any more."""
        self._opened.set()

    def wait(self, count: int) -> None:
        """Until so many bytes more may pass."""
        if self.rate == STALLED:
            self._opened.wait()
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self.rate
            until = self._free_at
        self._opened.wait(max(0.0, until - time.monotonic()))


class HeldStore(FolderStore):
    """A folder read through a gate."""

    def __init__(self, root: str, gate: Gate) -> None:
        super().__init__(root)
        self._gate = gate

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """See ObjectStore."""
        for start in range(0, len(buffer), PART):
            self._gate.wait(len(buffer[start : start + PART]))
        return super().read_into(name, buffer, offset)


class NarrowWire(socketserver.ThreadingTCPServer):
    """Forwards TCP connections to `endpoint`, an http:// address; its answers come through a gate. Raises UserError."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, endpoint: str, gate: Gate) -> None:
        where = urlsplit(endpoint)
        if where.scheme != "http" or not where.hostname:
            raise UserError("a server is narrowed by its http:// address: set PREREAD_S3_ENDPOINT to one")
        self.target, self.gate = (where.hostname, where.port or 80), gate
        super().__init__(("127.0.0.1", 0), _Forward)
        self._thread = threading.Thread(target=self.serve_forever, name="narrow-wire", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> NarrowWire:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.gate.open()
        self.shutdown()
        self.server_close()


class _Forward(socketserver.BaseRequestHandler):
    server: NarrowWire

    def handle(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection(self.server.target) as far:
            threading.Thread(target=self._ask, args=(far,), daemon=True).start()
            while data := far.recv(PIECE):
                self.server.gate.wait(len(data))
                self.request.sendall(data)

    def _ask(self, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(PIECE):
                far.sendall(data)
        with contextlib.suppress(OSError):  # the client has left
            far.shutdown(socket.SHUT_RDWR)
