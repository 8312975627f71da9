"""Against a real server: what is acknowledged is there, what is not leaves nothing, and a server that comes back is used."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from datetime import datetime, timedelta

import pytest
from kv_samples import record, same
from rude_server import RudeServer

import storage.s3_upload as s3_upload
from storage.breaker import Breaker
from storage.errors import ObjectMissing, StorageUnavailable
from storage.kvstore import KVStore
from storage.retry import Retry
from storage.s3 import S3Store
from storage.s3_errors import is_trouble
from storage.sealed import SealedStore
from storage.types import Miss

pytestmark = pytest.mark.services
MIB = 1 << 20
RECORD = record(tokens=50)


def uploads(store: S3Store) -> int:
    page = store._client.list_multipart_uploads(Bucket=store._bucket, Prefix=store._prefix)
    return len(page.get("Uploads", ()))


def read(store, name: str, size: int, offset: int = 0) -> bytes:
    buffer = bytearray(size)
    return bytes(buffer[: store.read_into(name, memoryview(buffer), offset)])


@pytest.fixture
def small_parts(monkeypatch):
    """Multipart from 10 MiB on, in the smallest parts that S3 allows."""
    monkeypatch.setattr(s3_upload, "PART", 5 * MIB)
    monkeypatch.setattr("storage.s3.MULTIPART_FROM", 10 * MIB)


# --- large objects -----------------------------------------------------------------------------------------


def test_a_large_object_goes_up_in_parts_and_comes_back_in_ranges(s3_store):
    data = os.urandom(MIB) * 40
    assert s3_store.put("large", [data[: 3 * MIB], memoryview(data)[3 * MIB :], b""]) == len(data)
    assert s3_store._client.head_object(Bucket="conformance", Key=s3_store._prefix + "large")["ETag"].endswith('-3"')
    assert read(s3_store, "large", len(data)) == data
    assert read(s3_store, "large", 20 * MIB, 17) == data[17 : 17 + 20 * MIB]
    assert read(s3_store, "large", 80 * MIB, MIB) == data[MIB:], "short at the end"
    assert uploads(s3_store) == 0


def test_parts_of_every_cut_give_the_same_bytes(s3_store, small_parts):
    for size in (10 * MIB, 10 * MIB + 1, 15 * MIB - 1):
        data = os.urandom(MIB + 7) * 16
        parts = [memoryview(data)[at : at + 3_000_017] for at in range(0, size, 3_000_017)]
        parts[-1] = parts[-1][: size - (len(parts) - 1) * 3_000_017]
        assert s3_store.put("cut", parts) == size
        assert read(s3_store, "cut", 20 * MIB) == data[:size]


@pytest.mark.parametrize("step", ["upload_part", "complete_multipart_upload"])
def test_an_upload_that_fails_is_aborted_and_the_older_object_stays(s3_store, small_parts, monkeypatch, step):
    s3_store.put("a", [b"older"])
    calls = []

    def fail(**what):
        calls.append(what)
        if len(calls) > 1 or step != "upload_part":
            raise OSError("the network is down")
        return real(**what)

    real = getattr(s3_store._client, step)
    monkeypatch.setattr("storage.retry.time.sleep", lambda seconds: None)
    monkeypatch.setattr(s3_store._client, step, fail)
    with pytest.raises(StorageUnavailable):
        s3_store.put("a", [bytes(12 * MIB)])
    assert uploads(s3_store) == 0
    assert read(s3_store, "a", 99) == b"older"


# --- processes that die ------------------------------------------------------------------------------------

WRITER = """
import sys, storage.s3_upload, storage.s3
storage.s3_upload.PART = 5 << 20
storage.s3.MULTIPART_FROM = int(sys.argv[5])
store = storage.s3.S3Store("conformance", sys.argv[1], endpoint=sys.argv[2], access_key=sys.argv[3], secret_key=sys.argv[4])
data = [bytes([7]) * (5 << 20)] * 6
print("ready", flush=True)
number = 0
while True:
    store.put(f"o/{number}", data)
    print(number, flush=True)
    number += 1
"""


@pytest.mark.parametrize("multipart_from", [10 * MIB, 1 << 40], ids=["multipart", "single"])
def test_a_writer_that_is_killed_leaves_no_half_and_what_it_left_is_swept(s3_store, s3_server, multipart_from):
    keys = [s3_server.endpoint, s3_server.access_key, s3_server.secret_key, str(multipart_from)]
    command = [sys.executable, "-c", WRITER, s3_store._prefix.rstrip("/"), *keys]
    left = 0
    for delay in (0.02, 0.05, 0.09):
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        assert writer.stdout.readline() == "0\n"
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        acknowledged = [0, *map(int, writer.stdout.read().split())]
        writer.wait()
        writer.stdout.close()
        for number in acknowledged:
            assert s3_store.size(f"o/{number}") == 30 * MIB
        for info in s3_store.entries("o/"):
            assert info.size == 30 * MIB, "whole or not at all"
        left += uploads(s3_store)
        assert s3_store.sweep(older_than_s=3600) == 0, "it may belong to a writer that lives"
        assert s3_store.sweep(older_than_s=-5) == uploads(s3_store) or uploads(s3_store) == 0
        assert uploads(s3_store) == 0
    if multipart_from == 10 * MIB:
        assert left >= 1, "no writer was killed in the middle of an upload"


@pytest.mark.parametrize("hours", [25, -25])
def test_a_sweep_goes_by_the_servers_clock_however_this_machines_has_jumped(s3_store, monkeypatch, hours):
    class Jumped(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(hours=hours)

    monkeypatch.setattr(s3_upload, "datetime", Jumped)
    begun = s3_store._client.create_multipart_upload(Bucket=s3_store._bucket, Key=s3_store._key("o/large"))
    assert s3_store.sweep(older_than_s=24 * 3600) == 0, "its writer lives"
    assert uploads(s3_store) == 1
    assert s3_store.sweep(older_than_s=-5) == 1, "and one that is old by the server's clock is found at once"
    assert uploads(s3_store) == 0
    assert begun["UploadId"]


RIVALS = """
import os, sys
from storage.s3 import S3Store
store = S3Store("conformance", sys.argv[1], endpoint=sys.argv[2], access_key=sys.argv[3], secret_key=sys.argv[4])
rivals = []
for number in range(16):
    rivals.append(os.fork())
    if not rivals[-1]:
        try:
            for _ in range(3):
                store.put("one", [bytes([number]) * 300_000])
            os._exit(0)
        finally:
            os._exit(1)
print([os.waitpid(rival, 0)[1] for rival in rivals], flush=True)
"""


def test_sixteen_processes_on_one_name_leave_one_complete_object(s3_store, s3_server):
    keys = [s3_server.endpoint, s3_server.access_key, s3_server.secret_key]
    command = [sys.executable, "-c", RIVALS, s3_store._prefix.rstrip("/"), *keys]
    rivals = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    whole, seen = {bytes([number]) * 300_000 for number in range(16)}, 0
    while rivals.poll() is None:
        with contextlib.suppress(ObjectMissing, StorageUnavailable):  # it may change between two tries
            assert read(s3_store, "one", 300_001) in whole
            seen += 1
    assert rivals.communicate()[0].strip() == str([0] * 16)
    assert seen, "somebody read while they wrote"
    assert read(s3_store, "one", 300_001) in whole
    assert list(s3_store.list("")) == ["one"]
    assert uploads(s3_store) == 0


def test_a_server_that_is_killed_in_mid_read_is_a_miss_and_is_used_again(own_s3_server):
    site = own_s3_server.server
    store = S3Store(
        "bucket", endpoint=site.endpoint, access_key=site.access_key, secret_key=site.secret_key,
        connect_timeout_s=1, read_timeout_s=1,
    )  # fmt: skip
    store._retry = Retry(is_trouble, Breaker(cool_down_s=0.5), attempts=2)
    store.ensure_bucket()
    kv = KVStore(store)
    kv.put(RECORD)
    data = os.urandom(MIB) * 48
    store.put("large", [data])
    stop, outcomes = threading.Event(), []

    def read_on() -> None:
        while not stop.is_set():
            try:
                outcomes.append(read(store, "large", len(data)) == data)
            except StorageUnavailable:
                outcomes.append(None)

    reader = threading.Thread(target=read_on)
    reader.start()
    while not outcomes:
        time.sleep(0.01)
    own_s3_server.kill()
    while None not in outcomes:
        time.sleep(0.01)
    stop.set()
    reader.join()
    assert False not in outcomes, "a read gives the right bytes or none"
    while not store.counters()["breaker_open"]:
        assert kv.get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    refused = store.counters()["breaker_refused"]
    assert kv.get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    assert store.counters()["breaker_refused"] > refused, "nobody waits for a server that is known to be down"
    own_s3_server.start()
    end = time.monotonic() + 20
    while (found := kv.get(RECORD.key, RECORD.profile)) is Miss.UNAVAILABLE and time.monotonic() < end:
        time.sleep(0.1)
    assert same(found, RECORD)
    assert store.counters()["breaker_open"] == 0
    assert read(store, "large", len(data)) == data
    store.close()


# --- many deletions ----------------------------------------------------------------------------------------


def test_an_error_in_a_success_is_a_failure_and_the_upload_is_aborted(small_parts, monkeypatch):
    """S3 answers 200 before it knows whether completing an upload works."""
    monkeypatch.setattr("storage.retry.time.sleep", lambda seconds: None)
    begun = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    error = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>hush</Message></Error>"
    with RudeServer(b"") as server:
        store = S3Store("bucket", endpoint=server.endpoint, access_key="k", secret_key="s", attempts=2)
        server.plan = [begun, b"", b"", b"", error, error, b""]
        with pytest.raises(StorageUnavailable, match="InternalError"):
            store.put("a", [bytes(12 * MIB)])
        assert server.requests[-1].startswith("DELETE /bucket/a?uploadId=u")
        store.close()


def test_what_could_not_be_deleted_is_named_with_its_reason():
    answer = (
        b"<DeleteResult><Error><Key>p/a/1</Key><Code>AccessDenied</Code></Error>"
        b"<Error><Key>p/a/2</Key><Code>InternalError</Code></Error>"
        b"<Error><Key>p/a/3</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
    )
    with RudeServer(b"") as server:
        store = S3Store("bucket", "p", endpoint=server.endpoint, access_key="k", secret_key="s", attempts=1)
        server.plan = [answer]
        names = [f"a/{number}" for number in range(5)]
        assert store.delete_many(names) == {"a/1": "AccessDenied", "a/2": "InternalError"}
        assert len(server.requests) == 1
        store.close()


# --- encryption --------------------------------------------------------------------------------------------


def test_the_server_encrypts_when_it_is_asked_to(own_s3_server, tmp_path):
    from storage.objects import open_store

    site = own_s3_server.server
    store = open_store(
        "s3://bucket/x?sse=AES256", s3_endpoint=site.endpoint, s3_access_key=site.access_key, s3_secret_key=site.secret_key
    )
    secret = uuid.uuid4().hex.encode() * 100
    store.put("a", [secret])
    large = secret * (33 * MIB // len(secret))
    store.put("large", [large])
    for name in ("a", "large"):
        assert store._client.head_object(Bucket="bucket", Key=f"x/{name}")["ServerSideEncryption"] == "AES256"
    assert read(store, "a", 9999) == secret
    assert read(store, "large", len(large)) == large
    volumes = list((tmp_path / "seaweedfs" / "data").rglob("*.dat"))
    assert volumes
    assert not any(secret[:200] in volume.read_bytes() for volume in volumes)
    store.close()


def test_sealed_objects_are_read_in_ranges_from_s3(s3_store):
    sealed = SealedStore(s3_store, [b"k" * 32], owner=lambda name: "t1")
    data = os.urandom(MIB) * 36
    sealed.put("a", [data])
    assert read(sealed, "a", len(data)) == data
    assert read(sealed, "a", 19 * MIB, 5 * MIB + 3) == data[5 * MIB + 3 : 24 * MIB + 3]
    assert sealed.size("a") == len(data)
