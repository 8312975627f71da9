"""A server on loopback that misbehaves as told: a tiny S3 look-alike with one object, or what stands before a real S3."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


class _Http(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that has left
            super().handle_error(request, client_address)


class RudeServer:
    """`plan` is consumed one behaviour per request; once empty, requests are answered well.

    Behaviours: a status code, "reset", "stall", "reset-body", "stall-body", "short-body", "slow-body", "no-range",
    "drip-body" and "drip-head" (a byte every 20 ms), "error-200" (an error's text as a success), "other-range",
    "other-etag", "skewed" (403 for a wrong clock), "close" (a good answer, then the connection is closed without a word).
    "throttled" (`bytes_per_s` over all connections together), "held-body" (half of it, and the rest once `go` is set).
    Bytes are what to answer to any method, with status 200.
    `always` comes after the plan, instead of good answers. `rules`: by a word, how requests with it in their line are treated,
    whatever the plan says. `upstream`: the server that knows the good answers; signatures pass, since the Host does.
    """

    def __init__(self, data: bytes = b"", tls: ssl.SSLContext | None = None, upstream: str = "") -> None:
        self.data, self.upstream = data, urlsplit(upstream).netloc
        self.plan: list[int | str | bytes | None] = []
        self.always: int | str | bytes | None = None
        self.rules: dict[str, int | str] = {}
        self.bytes_per_s = 1 << 16
        self.go, self.well, self.line = threading.Event(), threading.Event(), threading.Lock()
        self.clock_ahead_s = 0.0
        self.requests: list[str] = []
        self.heads: list[dict[str, str]] = []  # of the same requests, names in lower case
        self.bodies: list[bytes] = []
        self.stop = threading.Event()
        server = self

        class Handler(_Handler):
            rude = server

        self._http = _Http(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._scheme = "http" if tls is None else "https"
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._http.server_port}"

    def behave(self) -> None:
        """From now on; what is stalled is let go."""
        self.plan, self.always, self.rules = [], None, {}
        self.go.set()
        self.well.set()
        self.well = threading.Event()

    def __enter__(self) -> RudeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.well.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rude: RudeServer

    def do_GET(self) -> None:
        line = f"{self.command} {self.path}"
        self.rude.requests.append(line)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.rude.heads.append({name.lower(): value for name, value in self.headers.items()})
        self.rude.bodies.append(self.body)
        ruled = [rule for word, rule in self.rude.rules.items() if word in line]
        behaviour = ruled[0] if ruled else self.rude.plan.pop(0) if self.rude.plan else self.rude.always
        with contextlib.suppress(ConnectionError):
            self._behave(behaviour)

    do_HEAD = do_PUT = do_DELETE = do_POST = do_GET

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((timestamp or time.time()) + self.rude.clock_ahead_s)

    def log_message(self, *_: object) -> None:
        pass

    def _behave(self, behaviour: int | str | bytes | None) -> None:
        if isinstance(behaviour, int):
            self._refuse(behaviour)
        elif isinstance(behaviour, bytes):
            self.send_response(200)
            self.send_header("Content-Length", str(len(behaviour)))
            self.end_headers()
            self.wfile.write(behaviour)
        elif behaviour == "skewed":
            self._refuse(403, "RequestTimeTooSkewed")
        elif behaviour == "drip-head":
            self._drip(b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 1000)
        elif behaviour == "reset":
            self._reset()
        elif behaviour == "stall":
            self.rude.well.wait()
            self.close_connection = True
        else:
            self._answer(behaviour)

    def _refuse(self, status: int, code: str = "") -> None:
        # Servers do quote the request, and so the key id, in what they send back.
        text = f"<Error><Code>{code or CODES[status]}</Code><Message>key AKIA-test-id sent hush</Message></Error>"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _drip(self, data: bytes) -> None:
        for byte in data:
            self.wfile.write(bytes([byte]))
            if self.rude.stop.wait(0.02):
                break
        self.close_connection = True

    def _reset(self) -> None:
        linger = struct.pack("ii", 1, 0)  # closing sends RST
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True

    def _answer(self, behaviour: str | None) -> None:
        if behaviour == "error-200":
            self._answer_error()
            return
        status, headers, data = self._ask() if self.rude.upstream else self._know(behaviour)
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if behaviour == "drip-body":
            self._drip(data)
            return
        if behaviour == "throttled":
            self._throttle(data)
            return
        if behaviour in (None, "no-range", "other-range", "other-etag", "close"):
            self.wfile.write(data)
            self.close_connection = behaviour == "close"
            return
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        if behaviour == "stall-body":
            self.rude.well.wait()
        elif behaviour == "slow-body":
            self.rude.stop.wait(0.2)
            self.wfile.write(data[len(data) // 2 :])
        elif behaviour == "held-body":
            self.rude.go.wait(60)
            self.wfile.write(data[len(data) // 2 :])
        elif behaviour == "reset-body":
            self._reset()
        self.close_connection = True

    def _know(self, behaviour: str | None) -> tuple[int, dict[str, str], bytes]:
        """The good answer for the one object, but for what is to be wrong in its head."""
        data, status, headers = self.rude.data, 200, {"Date": self.date_time_string()}
        ranged = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if ranged and behaviour != "no-range":
            start, status = int(ranged[1]), 206
            data = data[start : int(ranged[2]) + 1]
            first = start + (behaviour == "other-range")
            headers["Content-Range"] = f"bytes {first}-{first + len(data) - 1}/{len(self.rude.data)}"
        headers |= {"ETag": '"another"' if behaviour == "other-etag" else '"one"', "Content-Length": str(len(data))}
        return status, headers, data

    def _ask(self) -> tuple[int, dict[str, str], bytes]:
        """The real server's answer."""
        asking = http.client.HTTPConnection(self.rude.upstream, timeout=30)
        try:
            asking.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    asking.putheader(name, value)
            asking.endheaders(self.body)
            answer = asking.getresponse()
            data = answer.read()
        finally:
            asking.close()
        dropped = ("connection", "transfer-encoding", "content-length")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in dropped}
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        return answer.status, headers | {"Content-Length": length or "0"}, data

    def _throttle(self, data: bytes) -> None:
        """One after another has the wire for a hundredth of a second."""
        piece = max(1, self.rude.bytes_per_s // 100)
        for at in range(0, len(data), piece):
            with self.rude.line:
                self.wfile.write(data[at : at + piece])
                if self.rude.stop.wait(0.01):
                    break

    def _answer_error(self) -> None:
        body = b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
