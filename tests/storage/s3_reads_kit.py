"""A store that reads from a rude server, and what it reads."""

from __future__ import annotations

import copy

import pytest
from kv_samples import record
from rude_server import RudeServer

from storage.breaker import Breaker
from storage.format import encode
from storage.retry import Retry
from storage.s3 import S3Store
from storage.s3_errors import is_trouble

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
