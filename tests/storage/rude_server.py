"""A tiny S3 look-alike on loopback that misbehaves as told; it knows one object."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


class RudeServer:
    """`plan` is consumed one behaviour per request; once empty, requests are answered well.

    Behaviours: a status code, "reset", "stall", "reset-body", "stall-body", "short-body", "no-range".
    `always` comes after the plan, instead of good answers.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.plan: list[int | str] = []
        self.always: int | str | None = None
        self.requests: list[str] = []
        self.stop = threading.Event()
        server = self

        class Handler(_Handler):
            rude = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> RudeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rude: RudeServer

    def do_GET(self) -> None:
        self.rude.requests.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        behaviour = self.rude.plan.pop(0) if self.rude.plan else self.rude.always
        with contextlib.suppress(ConnectionError):
            self._behave(behaviour)

    do_HEAD = do_PUT = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _behave(self, behaviour: int | str | None) -> None:
        if isinstance(behaviour, int):
            self._refuse(behaviour)
        elif behaviour == "reset":
            self._reset()
        elif behaviour == "stall":
            self.rude.stop.wait()
            self.close_connection = True
        else:
            self._answer(behaviour)

    def _refuse(self, status: int) -> None:
        # Servers do quote the request, and so the key id, in what they send back.
        text = f"<Error><Code>{CODES[status]}</Code><Message>key AKIA-test-id sent hush</Message></Error>"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        linger = struct.pack("ii", 1, 0)  # closing sends RST
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True

    def _answer(self, behaviour: str | None) -> None:
        data, start = self.rude.data, 0
        ranged = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if ranged and behaviour != "no-range":
            start = int(ranged[1])
            data = data[start : int(ranged[2]) + 1]
        self.send_response(206 if ranged and behaviour != "no-range" else 200)
        if ranged and behaviour != "no-range":
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{len(self.rude.data)}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if behaviour in (None, "no-range"):
            self.wfile.write(data)
            return
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        if behaviour == "stall-body":
            self.rude.stop.wait()
        elif behaviour == "reset-body":
            self._reset()
        self.close_connection = True
