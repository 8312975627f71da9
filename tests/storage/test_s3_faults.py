"""Whatever an S3 server does, reading KV from it ends in a record or in the reason for a miss."""

from __future__ import annotations

import copy
import time

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError, ReadTimeoutError
from kv_samples import same
from s3_reads_kit import DATA, RECORD
from urllib3.exceptions import ProtocolError

from storage.breaker import Breaker
from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable
from storage.kvstore import KVStore
from storage.retry import Retry
from storage.s3 import S3Store
from storage.s3_errors import is_trouble
from storage.types import Miss

SECRET_KEY = "hush-hush-secret"


@pytest.fixture(scope="module")
def connect(running_server):
    """Makes stores that talk to the rude server; each kind once, as making one takes boto3 half a second."""
    made: dict[float, S3Store] = {}

    def make(attempts: int = 1, read_timeout_s: float = 1.0, deadline_s: float = 60) -> S3Store:
        kind = read_timeout_s
        store = made[kind] = made.get(kind) or S3Store(
            "bucket",
            endpoint=running_server.endpoint,
            access_key="AKIA-test-id",
            secret_key=SECRET_KEY,
            connect_timeout_s=2,
            read_timeout_s=read_timeout_s,
        )
        fresh = copy.copy(store)  # with a breaker that knows of no failures
        fresh._retry = Retry(is_trouble, Breaker(), attempts=attempts, deadline_s=deadline_s)
        return fresh

    yield make
    for store in made.values():
        store.close()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between attempts, noted instead of waited for."""
    noted: list[float] = []
    monkeypatch.setattr("storage.retry.time.sleep", noted.append)
    return noted


FAULTS = [
    (403, Miss.UNAVAILABLE),
    (404, Miss.ABSENT),
    (500, Miss.UNAVAILABLE),
    (503, Miss.UNAVAILABLE),
    ("reset", Miss.UNAVAILABLE),
    ("stall", Miss.TIMEOUT),
]
BODY_FAULTS = [
    ("reset-body", Miss.UNAVAILABLE),
    ("stall-body", Miss.TIMEOUT),
    ("short-body", Miss.UNAVAILABLE),
]


def test_the_server_answers_well_when_it_is_not_told_otherwise(connect):
    assert same(KVStore(connect()).get(RECORD.key, RECORD.profile), RECORD)


@pytest.mark.parametrize(("fault", "miss"), FAULTS)
def test_a_fault_before_the_object_is_a_miss_with_its_reason(server, connect, fault, miss):
    server.always = fault
    store = KVStore(connect())
    assert store.get(RECORD.key, RECORD.profile) is miss
    assert store.get_many([RECORD.key], RECORD.profile, deadline_s=5) == {RECORD.key: miss}
    assert store.counters()[f"miss_{miss}"] == 2


@pytest.mark.parametrize(("fault", "miss"), FAULTS + BODY_FAULTS)
def test_after_a_fault_in_head_or_body_the_record_is_there_again(server, connect, fault, miss):
    store = KVStore(connect())
    server.always = fault
    assert store.get(RECORD.key, RECORD.profile) is miss
    server.always = None
    assert same(store.get(RECORD.key, RECORD.profile), RECORD)


def test_three_slow_downs_and_then_success_is_success(server, connect, pauses):
    server.plan = [503, 503, 503]
    assert same(KVStore(connect(attempts=4)).get(RECORD.key, RECORD.profile), RECORD)
    assert len(pauses) == 3
    assert len(set(pauses)) == 3  # growing at random, so that clients do not come back all at once
    assert max(pauses) <= 8


def test_attempts_are_bounded(server, connect, pauses):
    server.always = 503
    assert KVStore(connect(attempts=4)).get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    assert len(server.requests) == 4


def test_nobody_listening_is_unavailable():
    store = S3Store("bucket", endpoint="http://127.0.0.1:1", access_key="k", secret_key="s", attempts=1)
    assert KVStore(store).get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    store.close()


def test_a_stalled_server_holds_nobody_past_the_deadline(server, connect):
    store = KVStore(connect(read_timeout_s=20))
    server.always = "stall"
    keys = [f"{number:064x}" for number in range(9)]
    begun = time.monotonic()
    assert store.get_many(keys, RECORD.profile, deadline_s=0.2) == dict.fromkeys(keys, Miss.TIMEOUT)
    assert time.monotonic() - begun < 10
    assert len(server.requests) <= 4
    assert store.counters()["miss_timeout"] == 9


@pytest.mark.parametrize("fault", [404, "error-200"])
def test_an_error_that_looks_like_an_answer_neither_stores_nor_deletes_nor_lists_anything(server, connect, fault):
    """Taken for answers, they would say: stored; deleted; and that nothing is there, so that all is owed again."""
    server.always = fault
    objects = connect()
    for act in (
        lambda: KVStore(objects).put(RECORD),
        lambda: KVStore(objects).delete([RECORD.key]),
        lambda: objects.delete_many([f"kv/ab/{number}" for number in range(1200)]),
        lambda: list(objects.list("kv/")),
        lambda: list(objects.entries("kv/")),
        lambda: objects.sweep(60),
    ):
        with pytest.raises(StorageUnavailable) as caught:
            act()
        assert caught.value.__cause__ is None
        assert all(word not in str(caught.value) for word in ("hush", "AKIA", "127.0.0.1"))


@pytest.mark.parametrize("fault", [403, 500, 503, "reset", "stall"])
def test_writing_deleting_and_listing_raise_our_error_and_tell_no_secrets(server, connect, fault):
    server.always = fault
    objects = connect()
    expected = StorageTimeout if fault == "stall" else StorageUnavailable
    for act in (
        lambda: KVStore(objects).put(RECORD),
        lambda: KVStore(objects).delete([RECORD.key]),
        lambda: list(objects.list("kv/")),
        lambda: objects.size("a"),
        lambda: objects.ensure_bucket(),
    ):
        with pytest.raises(expected) as caught:
            act()
        assert caught.value.retryable
        assert caught.value.__cause__ is None
        assert all(word not in str(caught.value) for word in ("hush", "AKIA", "127.0.0.1"))


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        (ReadTimeoutError(endpoint_url="u"), StorageTimeout),
        (ConnectTimeoutError(endpoint_url="u"), StorageTimeout),
        (TimeoutError("hush"), StorageTimeout),
        (EndpointConnectionError(endpoint_url="u"), StorageUnavailable),
        (ClientError({"Error": {"Code": "Strange", "Message": "hush"}}, "x"), StorageUnavailable),
        (ProtocolError("hush"), StorageUnavailable),
        (ConnectionResetError("hush"), StorageUnavailable),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_every_foreign_error_becomes_ours(connect, monkeypatch, foreign, ours):
    def fail(**_: object) -> None:
        raise foreign

    store = connect()
    monkeypatch.setattr(store._client, "put_object", fail)
    with pytest.raises(ours) as caught:
        store.put("a", [b"x"])
    assert type(caught.value) is ours
    assert "hush" not in str(caught.value)


def test_a_missing_object_is_told_from_a_missing_bucket(server, connect):
    server.always = 404
    with pytest.raises(ObjectMissing):
        connect().read_into("a", memoryview(bytearray(3)))
    with pytest.raises(StorageUnavailable, match="NoSuchKey"):
        connect().put("a", [b"x"])


def test_a_server_that_ignores_ranges_is_not_believed(server, connect):
    server.always = "no-range"
    buffer = bytearray(10)
    assert connect().read_into("a", memoryview(buffer)) == 10
    assert buffer == DATA[:10]
    with pytest.raises(StorageUnavailable, match="range"):
        connect().read_into("a", memoryview(buffer), offset=5)


@pytest.mark.services
def test_a_wrong_key_is_unavailable_and_the_bucket_is_made_only_once(s3_server):
    known = {"endpoint": s3_server.endpoint, "access_key": s3_server.access_key}
    right, wrong = s3_server.secret_key, "wrong-secret"
    stores = [S3Store("another-bucket", secret_key=key, **known) for key in (right, right, wrong)]
    stores[0].ensure_bucket()
    stores[1].ensure_bucket()
    stores[0].put("a", [b"x"])
    assert stores[1].size("a") == 1
    with pytest.raises(StorageUnavailable) as caught:
        stores[2].put("a", [b"y"])
    assert "wrong-secret" not in str(caught.value)
    assert KVStore(stores[2]).get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    for store in stores:
        store.close()


@pytest.mark.services
def test_prefixes_in_one_bucket_do_not_see_each_other(s3_server):
    keys = {"access_key": s3_server.access_key, "secret_key": s3_server.secret_key}
    one, other = (S3Store("prefixes", prefix, endpoint=s3_server.endpoint, **keys) for prefix in ("p", "p2"))
    one.ensure_bucket()
    one.put("a", [b"x"])
    assert list(other.list("")) == []
    assert other.size("a") is None
    assert list(one.list("")) == ["a"]
    for store in (one, other):
        store.close()


def test_requests_are_as_stores_that_only_speak_like_s3_take_them(server, connect):
    """Newer SDKs add checksums of their own and bucket names in host names."""
    server.heads, server.plan = [], [b""]
    store = connect()
    store.put("kv/one", [b"bytes"])
    store.read_all("kv/one", bytearray)
    assert {line.split("?")[0] for line in server.requests} == {"PUT /bucket/kv/one", "GET /bucket/kv/one"}
    assert not [name for head in server.heads for name in head if "checksum" in name or name == "x-amz-trailer"]
    assert all(head["host"] == server.endpoint.removeprefix("http://") for head in server.heads)


@pytest.mark.parametrize(("region", "said"), [("us-east-1", b""), ("eu-central-1", b"eu-central-1")])
def test_a_bucket_is_made_where_the_region_says(server, region, said):
    server.bodies, server.plan = [], [404, b""]
    store = S3Store("made", endpoint=server.endpoint, access_key="k", secret_key=SECRET_KEY, region=region)
    store.ensure_bucket()
    store.close()
    assert [line.split(" ")[0] for line in server.requests] == ["HEAD", "PUT"]
    assert said in server.bodies[1]
    assert (b"LocationConstraint" in server.bodies[1]) == bool(said)
