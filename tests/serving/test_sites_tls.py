"""Two sites with HTTPS between them: a child process fetches from a parent behind TLS, under a CA of the operator's own."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from api_kit import Site
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from site_kit import PROFILE, object_name, parent_corpus, record, register

from storage.folder import FolderStore
from storage.format import is_whole

HERE = Path(__file__).parent
DAY = datetime.timedelta(days=1)

FRONT = """
import socket, ssl, sys, threading

port, certificate = int(sys.argv[1]), sys.argv[2]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate)
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)

def pump(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for each in (source, target):
        each.close()

def serve(client):
    try:
        near = context.wrap_socket(client, server_side=True)
    except OSError:  # the client refused the certificate
        client.close()
        return
    far = socket.create_connection(("127.0.0.1", port))
    threading.Thread(target=pump, args=(far, near), daemon=True).start()
    pump(near, far)

while True:
    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
"""

CHILD = """
import json, sys
from pathlib import Path
from site_kit import PROFILE, record
from storage.folder import FolderStore
from storage.kvstore import KVStore
from storage.peer import PeerStore
from storage.readthrough import ReadThrough
from storage.site_key import SiteKey
from storage.types import KVRecord

url, site_key, folder, key = sys.argv[1:]
store = KVStore(ReadThrough(FolderStore(folder), PeerStore(url, SiteKey.parse(site_key)), lambda key: True))
found = store.get(key, PROFILE)
right = isinstance(found, KVRecord) and found.kv.equal(record(key).kv)
print(json.dumps({"found": "the right KV" if right else str(found), "counters": store.counters()}))
"""


@dataclass(frozen=True)
class Authority:
    """A CA of the operator's own."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @staticmethod
    def make(name: str) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        public = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = _builder(subject, subject, key, DAY).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return Authority(key, builder.add_extension(public, critical=False).sign(key, hashes.SHA256()))

    def write(self, path: Path) -> Path:
        path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        return path

    def issue(self, path: Path, address: str, left: datetime.timedelta) -> Path:
        """A key and a certificate of it, for a server at an IP address, that is valid for as long as is `left`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "parent")])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = _builder(subject, self.certificate.subject, key, left).add_extension(names, critical=False)
        certificate = builder.add_extension(issuer, critical=False).sign(self.key, hashes.SHA256())
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, *plain)
        path.write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))
        return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, left: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(now - 7 * DAY).not_valid_after(now + left)


@contextmanager
def behind_tls(site: Site, certificate: Path) -> Iterator[str]:
    """The parent's address behind a process that ends TLS, as in front of a real one."""
    command = [sys.executable, "-c", FRONT, str(urlsplit(site.url).port), str(certificate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        try:
            assert front.stdout is not None
            yield f"https://127.0.0.1:{int(front.stdout.readline())}"
        finally:
            front.kill()


def fetched(url: str, site_key: str, folder: Path, key: str, trusted: Path) -> dict[str, Any]:
    """What a child process gets."""
    paths = [str(HERE.parent.parent), str(HERE), *(path for path in sys.path if path.startswith(str(HERE.parent)))]
    environment = os.environ | {"SSL_CERT_FILE": str(trusted), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", CHILD, url, site_key, str(folder), key]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "signature" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ("of the trusted CA", "the right KV"),
        ("of another CA", "unavailable"),
        ("of another address", "unavailable"),
        ("that is over", "unavailable"),
    ],
)
def test_a_child_takes_stored_kv_under_a_certificate_that_holds_and_under_no_other(
    site: Site, tmp_path: Path, server: str, found: str
) -> None:
    parent_corpus(site, "handbook", {"a.txt": "Cats sleep in the afternoon. " * 20})
    [name] = list(site.parts.objects.list("kv/"))[:1]
    key, site_key, here = name.rpartition("/")[2], register(site), tmp_path / "child"
    ours, theirs = Authority.make("ours"), Authority.make("theirs")
    issuer = theirs if server == "of another CA" else ours
    address = "192.0.2.1" if server == "of another address" else "127.0.0.1"
    certificate = issuer.issue(tmp_path / "server.pem", address, -DAY if server == "that is over" else DAY)
    with behind_tls(site, certificate) as url:
        child = fetched(url, site_key.text(), here, key, ours.write(tmp_path / "ca.pem"))
    assert child["found"] == found
    kept = [*FolderStore(here).list("kv/")]
    if found == "unavailable":
        assert child["counters"]["miss_unavailable"] == 1
        assert child["counters"]["hits"] == 0
        assert kept == []
    else:
        assert child["counters"]["hits"] == 1
        assert kept == [object_name(key)]
        data = memoryview(bytearray(FolderStore(here).size(name) or 0))
        FolderStore(here).read_into(name, data)
        assert is_whole(data, key)
        assert record(key).profile == PROFILE
