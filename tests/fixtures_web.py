"""A web server on loopback that answers as told, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]  # by lower-case name
    body: bytes


@dataclass
class Reply:
    """`drip`: seconds between the body's bytes, and between the head's lines if `drip_head`."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    drip: float = 0.0
    drip_head: bool = False


@dataclass
class Web:
    """`pages`: path -> what is answered, or a function of what was asked."""

    port: int
    pages: dict[str, Reply | Callable[[Asked], Reply]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    rest: Callable[[Asked], Reply] = lambda asked: Reply(b"no such page", 404)  # for all other paths

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up, also amid a handshake, is what tests are about."""


def certificate(folder: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """A certificate of its own authority for a host's name, and what serves with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, secret = folder / "certificate.pem", folder / "key.pem"
    pem.write_bytes(made.public_bytes(Encoding.PEM))
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, secret)
    return pem, context


@contextlib.contextmanager
def web(tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    stop = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            made.asked.append(asked)
            page = made.pages.get(self.path.partition("?")[0], made.rest)
            with contextlib.suppress(OSError):
                self.reply(page(asked) if callable(page) else page)

        def reply(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in {"content-length": str(len(reply.body)), **reply.headers}.items():
                if reply.drip_head:
                    self.flush_headers()
                    stop.wait(reply.drip)
                self.send_header(name, value)
            self.end_headers()
            for byte in reply.body if reply.drip else ():
                if stop.wait(reply.drip):
                    return
                self.wfile.write(bytes([byte]))
            if not reply.drip:
                self.wfile.write(reply.body)

        do_GET = do_POST = do_HEAD = answer

        def log_message(self, *_: Any) -> None:
            return

    server = _Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    made = Web(server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        server.shutdown()
        thread.join()
        server.server_close()


def wait_for(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until it is so; on a busy machine that may take a while."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
