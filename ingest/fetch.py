"""HTTP to places that users name, through the operator's list: within bytes and seconds, each redirect checked."""

from __future__ import annotations

import ssl
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from ingest.egress import AllowedHosts, Place
from storage.errors import FileError

CONNECT_SECONDS = 5.0
QUIET_SECONDS = 20.0  # without a byte
MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_FOR_ONE_HOST = ("authorization", "cookie")
Sink = Callable[[bytes], object]


class FetchFailed(FileError):
    """What was asked for did not come: no answer, a refusal, too much of it, or too slowly."""

    code = "storage_error"
    retryable = True


@dataclass(frozen=True)
class Answer:
    """`headers` by lower-case name. The body has gone to the sink."""

    status: int
    headers: Mapping[str, str]
    url: str


class Fetcher:
    """For one thread. Connections are kept, each to the address that was checked when its host was first met."""

    def __init__(self, allowed: AllowedHosts) -> None:
        self._allowed = allowed
        self._ssl: ssl.SSLContext | None = None
        self._pools: dict[tuple[str, str, int], httpcore.ConnectionPool] = {}
        self._clock = _Clock()

    def get(self, url: str, sink: Sink, *, max_bytes: int, seconds: float, headers: Mapping[str, str] | None = None) -> Answer:
        """Fetch a URL, redirects followed; its decoded body goes to the sink, whatever the status.

        Raises FetchFailed, HostRefused, UserError."""
        sent = {"accept-encoding": "identity", **(headers or {})}
        self._clock.start(seconds)
        place = self._locate(url)
        for _ in range(MOST_REDIRECTS + 1):
            answer = self._ask("GET", place, sent, None, sink, max_bytes)
            where = answer.headers.get("location")
            if answer.status not in _REDIRECTS or where is None:
                return answer
            target = self._locate(_joined(place, where))
            if place.url.scheme == "https" and target.url.scheme == "http":
                raise FetchFailed(f"{place.host} redirects from https to http")
            if target.origin != place.origin:
                sent = {name: value for name, value in sent.items() if name.lower() not in _FOR_ONE_HOST}
            place = target
        raise FetchFailed(f"{place.host} redirects more than {MOST_REDIRECTS} times")

    def post(self, url: str, body: bytes, *, max_bytes: int, seconds: float, headers: Mapping[str, str]) -> Answer:
        """Send a body; redirects are answers like others. Raises FetchFailed, HostRefused, UserError."""
        self._clock.start(seconds)
        return self._ask("POST", self._locate(url), dict(headers), body, lambda piece: None, max_bytes)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _locate(self, url: str) -> Place:
        place = self._allowed.check(url)
        if place.origin in self._pools:
            return place
        try:
            place = self._allowed.locate(url)
        except OSError:
            raise FetchFailed(f"the host {place.host} was not found") from None
        if place.url.scheme == "https":
            self._ssl = self._ssl or httpx.create_ssl_context()  # also heeds SSL_CERT_FILE
        backend = _Pinned(place, self._clock)
        self._pools[place.origin] = httpcore.ConnectionPool(self._ssl, max_connections=1, network_backend=backend)
        return place

    def _ask(
        self, method: str, place: Place, headers: Mapping[str, str], body: bytes | None, sink: Sink, max_bytes: int
    ) -> Answer:
        pauses = {"connect": CONNECT_SECONDS, "read": QUIET_SECONDS, "write": QUIET_SECONDS, "pool": 0.0}
        url = httpcore.URL(scheme=place.url.scheme, host=place.host, port=place.port, target=place.url.raw_path)
        sent = [("host", _host_header(place)), ("user-agent", "preread"), *headers.items()]
        try:
            with self._pools[place.origin].stream(
                method, url, headers=sent, content=body, extensions={"timeout": pauses}
            ) as reply:
                found = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in reply.headers}
                follows = method == "GET" and reply.status in _REDIRECTS
                pieces = _decoded(reply.iter_stream(), found.get("content-encoding", ""), max_bytes)
                for piece in pieces:
                    if not follows:
                        sink(piece)
                return Answer(reply.status, found, str(place.url))
        except httpcore.TimeoutException:
            raise FetchFailed(f"{place.host} took too long") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError, OSError) as error:
            raise FetchFailed(f"{place.host} could not be reached ({type(error).__name__})") from None


def _joined(place: Place, where: str) -> str:
    try:
        return str(place.url.join(where))
    except httpx.InvalidURL:
        raise FetchFailed(f"{place.host} redirects to what is no URL") from None


def _host_header(place: Place) -> str:
    return place.url.netloc.decode("ascii")


def _decoded(pieces: Iterable[bytes], encoding: str, max_bytes: int) -> Iterable[bytes]:
    """The body's bytes, not more of them than allowed: neither as sent nor unpacked."""
    unpack: Any = zlib.decompressobj(47) if encoding in ("gzip", "x-gzip", "deflate") else None
    if unpack is None and encoding not in ("", "identity"):
        raise FetchFailed(f"the answer is packed as {encoding[:20]!r}, which was not asked for")
    sent = left = max_bytes
    for piece in pieces:
        sent -= len(piece)
        while piece and min(sent, left) >= 0:
            out, piece = (piece, b"") if unpack is None else _inflated(unpack, piece, left + 1)
            left -= len(out)
            if out and left >= 0:
                yield out
        if min(sent, left) < 0:
            raise FetchFailed(f"the answer is larger than {max_bytes} bytes", code="too_large", retryable=False)


def _inflated(unpack: Any, piece: bytes, most: int) -> tuple[bytes, bytes]:
    try:
        out = unpack.decompress(piece, most)
    except zlib.error:
        raise FetchFailed("the answer's packed body is damaged") from None
    return out, unpack.unconsumed_tail


class _Clock:
    """When the request under way must be over."""

    def start(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, most: float | None, late: type[Exception]) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise late("the time is up")
        return left if most is None else min(left, most)


class _Pinned(httpcore.NetworkBackend):
    """Connects to the addresses of one place, and to nothing else."""

    def __init__(self, place: Place, clock: _Clock) -> None:
        self._place, self._clock = place, clock
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None, socket_options: Any = None
    ) -> httpcore.NetworkStream:
        failed: Exception = httpcore.ConnectError("no address")
        for address in self._place.addresses:
            left = self._clock.left(timeout, httpcore.ConnectTimeout)
            try:
                return _Timed(self._sockets.connect_tcp(address, port, left, local_address, socket_options), self._clock)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed


class _Timed(httpcore.NetworkStream):
    """No read or write goes on past the request's end, however steadily bytes drip."""

    def __init__(self, stream: httpcore.NetworkStream, clock: _Clock) -> None:
        self._stream, self._clock = stream, clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._clock.left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._clock.left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = self._clock.left(timeout, httpcore.ConnectTimeout)
        return _Timed(self._stream.start_tls(ssl_context, server_hostname, left), self._clock)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
