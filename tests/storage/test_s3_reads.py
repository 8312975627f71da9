"""Reading over plain HTTP: nothing is believed that was not asked for, and nothing is waited for past its deadline."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time

import pytest
from kv_samples import same
from rude_server import RudeServer
from s3_reads_kit import DATA, RECORD, read

import storage.s3 as s3
from storage.deadline import until
from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable
from storage.kvstore import KVStore
from storage.s3 import S3Store
from storage.types import Miss

# --- deadlines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drip", ["drip-body", "drip-head"])
def test_bytes_that_drip_in_do_not_outlast_the_deadline(server, connect, drip):
    server.always = drip  # each byte comes well within the time that one may take
    begun = time.monotonic()
    with pytest.raises(StorageTimeout):
        read(connect(deadline_s=0.6))
    assert 0.5 < time.monotonic() - begun < 20


def test_a_slow_server_within_the_deadline_gives_the_right_record(server, connect):
    server.plan = ["slow-body"]
    kv = KVStore(connect())
    assert same(kv.get_many([RECORD.key], RECORD.profile, 10)[RECORD.key], RECORD)
    assert kv.counters()["hits"] == 1


def test_the_deadline_covers_all_attempts_and_their_pauses(server, connect):
    server.always = 503
    begun = time.monotonic()
    with pytest.raises(StorageUnavailable):
        read(connect(attempts=1000, deadline_s=0.5))
    assert time.monotonic() - begun < 20
    assert len(server.requests) > 1


@pytest.mark.parametrize("fault", ["stall", "stall-body", "drip-body", 503])
def test_readers_that_get_many_leaves_behind_end_with_its_deadline(server, connect, fault):
    server.always = fault
    store = KVStore(connect(attempts=1000, deadline_s=60))
    assert store.get_many([RECORD.key], RECORD.profile, 0.25)[RECORD.key] in (Miss.TIMEOUT, Miss.UNAVAILABLE)
    end = time.monotonic() + 20
    while _readers() and time.monotonic() < end:
        time.sleep(0.01)
    assert not _readers()


def _readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("kv-reader", "object-reader")]


def test_an_inner_deadline_never_outlasts_an_outer_one(server, connect):
    server.always = "drip-body"
    begun = time.monotonic()
    with until(begun + 0.2), until(begun + 30), pytest.raises(StorageTimeout):
        read(connect())
    assert time.monotonic() - begun < 20


def test_an_upload_that_crawls_ends_with_the_deadline():
    """The server takes a little all the time, so that no single write waits for long."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        threading.Thread(target=_sip, args=(listening,), daemon=True).start()
        port = listening.getsockname()[1]
        store = S3Store(
            "bucket", endpoint=f"http://127.0.0.1:{port}", access_key="k", secret_key="s", deadline_s=0.6, attempts=1
        )
        begun = time.monotonic()
        with pytest.raises(StorageTimeout):
            store.put("a", [bytes(16 << 20)])
        assert 0.5 < time.monotonic() - begun < 20
        store.close()


def _sip(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        while connection.recv(1 << 16):
            time.sleep(0.02)


# --- answers to other questions ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["error-200", "other-range", "short-body"])
def test_an_answer_to_another_question_is_unavailable_and_never_a_record(server, connect, fault):
    server.always = fault
    store = KVStore(connect())
    assert store.get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    assert store.counters()["miss_damaged"] == 0
    server.always = None
    assert same(store.get(RECORD.key, RECORD.profile), RECORD)


@pytest.mark.parametrize("fault", ["error-200", "no-range", "other-range", "short-body", "reset-body", 500, 403])
def test_an_object_of_unknown_size_is_read_right_or_not_at_all(server, connect, fault):
    server.always = fault
    with pytest.raises(StorageUnavailable):
        read_whole(connect())
    server.always = None
    assert read_whole(connect()) == DATA
    server.plan, server.requests = [fault if isinstance(fault, int) else "reset-body"], []
    if fault != 403:
        assert read_whole(connect(attempts=3)) == DATA
        assert len(server.requests) == 2, "one request tells the size and brings the bytes"


def read_whole(store: S3Store) -> bytes:
    data = bytearray()

    def allocate(size: int) -> memoryview:
        nonlocal data
        data = bytearray(size)
        return memoryview(data)

    assert store.read_all("a", allocate) == len(data)
    return bytes(data)


def test_a_large_object_of_unknown_size_changes_nowhere_in_between(server, connect, monkeypatch):
    monkeypatch.setattr(s3, "RANGE", len(DATA) // 3)
    assert read_whole(connect()) == DATA
    server.plan = [None, "other-etag"]
    with pytest.raises(StorageUnavailable, match="changed"):
        read_whole(connect())


def test_an_object_that_changes_between_two_ranges_is_not_mixed(server, connect, monkeypatch):
    monkeypatch.setattr(s3, "RANGE", len(DATA) // 3)
    server.plan = [None, "other-etag"]
    with pytest.raises(StorageUnavailable, match="changed"):
        read(connect())
    assert read(connect()) == DATA


@pytest.mark.parametrize("part", [1, 7, 100, len(DATA) - 1, len(DATA), len(DATA) + 1])
def test_a_read_in_ranges_gives_the_same_bytes(server, connect, monkeypatch, part):
    monkeypatch.setattr(s3, "RANGE", max(part, len(DATA) // 8))
    store = connect()
    assert read(store) == DATA
    assert read(store, 500, 100) == DATA[100:600]


def test_one_range_in_trouble_is_asked_for_again_alone(server, connect, monkeypatch):
    monkeypatch.setattr("storage.retry.time.sleep", lambda seconds: None)
    monkeypatch.setattr(s3, "RANGE", len(DATA) // 4 + 1)
    server.plan = ["reset-body", 503]
    assert read(connect(attempts=4)) == DATA
    assert len(server.requests) == 6


def test_a_missing_object_is_missing_in_ranges_too(server, connect, monkeypatch):
    monkeypatch.setattr(s3, "RANGE", 100)
    server.always = 404
    with pytest.raises(ObjectMissing):
        read(connect())
    assert not _readers()


# --- connections -------------------------------------------------------------------------------------------


def test_connections_are_kept_and_one_that_the_server_has_closed_is_no_failure(server, connect):
    store = connect()
    server.plan = [None, None, "close", None]
    for _ in range(5):
        assert read(store) == DATA
    assert store.counters()["retries"] == 0
    assert len(server.requests) == 5


def test_a_broken_answer_never_reaches_the_next_reader(server, connect):
    """A connection with half an answer in it is not used again."""
    store = connect()
    for fault in ("stall-body", "reset-body", "short-body", "error-200", "no-range", "other-range"):
        server.plan = [fault]
        try:
            read(store)
        except StorageUnavailable:
            pass
        assert read(store, 300, 7) == DATA[7:307], fault


def test_tls_is_verified(tmp_path, monkeypatch):
    certificate, context = _certificate(tmp_path)
    with RudeServer(DATA, tls=context) as server:
        keys = {"endpoint": server.endpoint, "access_key": "k", "secret_key": "s", "attempts": 1}
        store = S3Store("bucket", **keys)
        with pytest.raises(StorageUnavailable, match="SSLCertVerificationError"):
            read(store)
        assert server.requests == []
        store.close()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        store = S3Store("bucket", **keys)
        assert read(store) == DATA
        assert store.size("a") == len(DATA)
        server.plan = [b""]
        assert store.put("a", [b"x"]) == 1
        store.close()


def _certificate(folder):
    """A certificate for 127.0.0.1 that nobody but its maker trusts."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, secret = folder / "cert.pem", folder / "key.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, secret)
    return pem, context
