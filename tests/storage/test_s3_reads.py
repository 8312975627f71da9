"""Reading over plain HTTP: nothing is believed that was not asked for, and nothing is waited for past its deadline."""

from __future__ import annotations

import copy
import datetime
import socket
import ssl
import threading
import time

import pytest
from kv_samples import record, same
from rude_server import RudeServer

import storage.s3 as s3
from storage.breaker import Breaker
from storage.deadline import until
from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable
from storage.format import encode
from storage.kvstore import KVStore
from storage.retry import Retry
from storage.s3 import S3Store
from storage.s3_errors import is_trouble
from storage.types import Miss

RECORD = record(tokens=50)
DATA = b"".join(encode(RECORD))


@pytest.fixture(scope="module")
def running_server():
    with RudeServer(DATA) as server:
        yield server


@pytest.fixture
def server(running_server):
    running_server.plan, running_server.always, running_server.requests = [], None, []
    running_server.clock_ahead_s = 0.0
    return running_server


@pytest.fixture(scope="module")
def root(running_server):
    """Making a store takes boto3 half a second: the tests' own are copies."""
    store = S3Store(
        "bucket", endpoint=running_server.endpoint, access_key="AKIA-test-id", secret_key="hush",
        connect_timeout_s=2, read_timeout_s=1,
    )  # fmt: skip
    yield store
    store.close()


@pytest.fixture
def connect(root):
    def make(attempts: int = 1, deadline_s: float = 60, **breaker) -> S3Store:
        store = copy.copy(root)
        store._retry = Retry(is_trouble, Breaker(**breaker), attempts=attempts, deadline_s=deadline_s)
        return store

    return make


def read(store: S3Store, length: int = len(DATA), offset: int = 0) -> bytes:
    buffer = bytearray(length)
    return bytes(buffer[: store.read_into("a", memoryview(buffer), offset)])


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


# --- the breaker -------------------------------------------------------------------------------------------


def test_after_failures_in_a_row_the_server_is_left_alone_and_then_probed_by_one(server, connect):
    now = [0.0]
    store = connect(threshold=3, cool_down_s=5, clock=lambda: now[0])
    kv = KVStore(store)
    server.always = 500
    for _ in range(10):
        assert kv.get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    assert len(server.requests) == 3
    assert store.counters()["breaker_open"] == 1
    assert store.counters()["breaker_refused"] == 7
    now[0] = 5.0
    for _ in range(4):
        assert kv.get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    assert len(server.requests) == 4, "one probe, and closed again for another five seconds"
    server.always = None
    assert kv.get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    now[0] = 10.0
    assert same(kv.get(RECORD.key, RECORD.profile), RECORD)
    counters = store.counters()
    assert (counters["breaker_open"], counters["breaker_opened"]) == (0, 1)
    assert kv.counters()["miss_unavailable"] == 15


def test_while_a_probe_is_under_way_nobody_else_asks():
    now = [0.0]
    breaker = Breaker(threshold=1, cool_down_s=5, probe_s=60, clock=lambda: now[0])
    breaker.failed(probe=False)
    now[0] = 5.0
    assert breaker.enter() is True
    for _ in range(3):
        with pytest.raises(StorageUnavailable):
            breaker.enter()
    now[0] = 65.0
    assert breaker.enter() is True, "a probe that was lost blocks nobody for ever"
    breaker.succeeded()
    assert breaker.enter() is False


def test_requests_that_were_under_way_when_it_opened_do_not_put_the_probe_off():
    now = [0.0]
    breaker = Breaker(threshold=2, cool_down_s=5, clock=lambda: now[0])
    for now[0] in (0.0, 1.5, 3.0, 4.5):
        breaker.failed(probe=False)
    now[0] = 6.4
    with pytest.raises(StorageUnavailable):
        breaker.enter()
    now[0] = 6.5
    assert breaker.enter() is True
    assert breaker.counters()["breaker_opened"] == 1


@pytest.mark.parametrize("fault", [403, 404])
def test_refusals_do_not_open_the_breaker(server, connect, fault):
    store = connect(threshold=2)
    server.always = fault
    for _ in range(5):
        with pytest.raises((StorageUnavailable, ObjectMissing)):
            read(store)
    assert len(server.requests) == 5
    assert store.counters()["breaker_open"] == 0


def test_a_caller_in_a_hurry_does_not_open_it_for_the_others(server, connect):
    server.always = "drip-body"
    store = connect(threshold=1)
    for _ in range(3):
        with until(time.monotonic() + 0.05), pytest.raises(StorageTimeout):
            read(store)
    assert store.counters()["breaker_open"] == 0


def test_pauses_are_drawn_from_all_of_a_bound_that_doubles(server, connect, monkeypatch):
    drawn, slept = [], []
    monkeypatch.setattr("storage.retry.random.uniform", lambda low, high: drawn.append((low, high)) or high / 2)
    monkeypatch.setattr("storage.retry.time.sleep", slept.append)
    server.always = 503
    with pytest.raises(StorageUnavailable):
        read(connect(attempts=9))
    assert drawn[:8] == [(0, 0.1), (0, 0.2), (0, 0.4), (0, 0.8), (0, 1.6), (0, 3.2), (0, 5.0), (0, 5.0)]
    assert slept == [high / 2 for _, high in drawn[:8]]


# --- clocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [read, lambda store: store.put("a", [b"x"]), lambda store: list(store.list(""))])
def test_a_clock_that_is_off_is_named_as_the_reason(server, connect, act):
    server.always, server.clock_ahead_s = "skewed", 3600
    with pytest.raises(StorageUnavailable, match=r"RequestTimeTooSkewed .*clock is 3[56]\d\d s behind the server"):
        act(connect(attempts=4))
    assert len(server.requests) == 1, "trying again does not help"


def test_a_refusal_with_the_right_clock_does_not_blame_it(server, connect):
    server.always = 403
    with pytest.raises(StorageUnavailable) as caught:
        read(connect())
    assert "clock" not in str(caught.value)


def test_every_attempt_is_signed_at_its_own_time(server, connect, monkeypatch):
    """After the clock has jumped, by hand or by NTP, no old signature is sent."""
    now = [datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)]
    monkeypatch.setattr("storage.s3_sign._now", lambda: now[0])
    monkeypatch.setattr("storage.retry.time.sleep", lambda seconds: now.__setitem__(0, now[0] + datetime.timedelta(days=1)))
    server.plan = [503]
    store = connect(attempts=2)
    assert read(store) == DATA
    now[0] -= datetime.timedelta(days=300)
    assert read(store) == DATA
    dates = [request.partition("X-Amz-Date=")[2][:8] for request in server.requests]
    assert dates == ["20300101", "20300102", "20290308"]
