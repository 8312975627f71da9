"""A stretch of wire on loopback between two sites: it can be cut, be long and thin, and be made to flip a byte.

Not tc/netem: that wants root and a kernel module that few test machines have, and would slow down all else on the interface.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

PIECE = 1 << 16


class Wire:
    """Forwards TCP connections to `target`. Bytes from it are the answers. `rtt_s`: to there and back, beside what is sent;
    `bytes_per_s`: of the answers of one connection; `delay_s`: before each piece."""

    def __init__(self, target: str) -> None:
        where = urlsplit(target)
        self._target = (where.hostname or "", where.port or 0)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._cut = self._reset = False
        self.delay_s = self.rtt_s = 0.0
        self.bytes_per_s: float | None = None
        self.flip_after: int | None = None  # answer bytes until one is flipped, once
        self.flipped = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.getsockname()[1]}"

    def cut(self, reset: bool = False) -> None:
        """Whatever is under way breaks off, and nothing gets through. Both sides see an end (FIN), or with `reset` an RST, as of
        a machine that has gone and come back."""
        with self._lock:
            self._cut, self._reset = True, reset
            for pair in self._pairs:
                for end in pair:
                    with contextlib.suppress(OSError):
                        if reset:
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
                        end.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            self._pairs.clear()

    def heal(self) -> None:
        with self._lock:
            self._cut = self._reset = False

    def close(self) -> None:
        self.cut()
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                with self._lock:
                    if self._cut:
                        near.close()
                        continue
                    far = socket.create_connection(self._target, timeout=30)
                    self._pairs.append((near, far))
            except OSError:
                near.close()
                continue
            threading.Thread(target=self._connect, args=(near, far), daemon=True).start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=self._carry, args=(far, near, True), daemon=True)
        back.start()
        self._carry(near, far, False)
        back.join()
        with self._lock:
            self._pairs = [pair for pair in self._pairs if pair[0] is not near]
        near.close()
        far.close()

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(maxsize=64)
        far = threading.Thread(target=self._arrive, args=(under_way, sink, answers), daemon=True)
        far.start()
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                if self.delay_s:
                    time.sleep(self.delay_s)
                under_way.put((time.monotonic() + self.rtt_s / 2, data))
        under_way.put((0.0, b""))
        far.join()
        for end in (source, sink) if not self._reset else ():
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _arrive(self, under_way: queue.Queue[tuple[float, bytes]], sink: socket.socket, answers: bool) -> None:
        """What was sent, half a round trip later; what a cut meets on its way is lost."""
        while (piece := under_way.get())[1]:
            time.sleep(max(0.0, piece[0] - time.monotonic()))
            data = self._spoilt(piece[1]) if answers else piece[1]
            step = max(1, int(self.bytes_per_s / 50)) if answers and self.bytes_per_s else len(data)
            with contextlib.suppress(OSError):
                for at in range(0, len(data), step):
                    sink.sendall(data[at : at + step])
                    if step < len(data):
                        time.sleep(0.02)

    def _spoilt(self, data: bytes) -> bytes:
        with self._lock:
            if self.flip_after is None:
                return data
            if self.flip_after >= len(data):
                self.flip_after -= len(data)
                return data
            at, self.flip_after = self.flip_after, None
            self.flipped += 1
            return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
