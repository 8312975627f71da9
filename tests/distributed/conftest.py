"""Sites over both kinds of backends: one machine's folder, and PostgreSQL with S3."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_site import Backends, Site
from promised import missing

from serving.local_broker import LocalBroker, server_binary


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    binary = server_binary()
    if binary is None:
        missing("valkey", "no Redis-compatible server here")
    broker = LocalBroker(binary, tmp_path / "broker", tmp_path / "broker.url")
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture(params=["one folder", "postgres and s3"])
def backends(request: pytest.FixtureRequest) -> Backends:
    if request.param == "one folder":
        return Backends({}, shared_folder=True)
    database: str = request.getfixturevalue("postgres_url")
    s3 = request.getfixturevalue("s3_server")
    environ = {
        "PREREAD_DATABASE_URL": database,
        "PREREAD_OBJECT_STORE": f"s3://story-{uuid.uuid4().hex[:8]}/kv",
        "PREREAD_S3_ENDPOINT": s3.endpoint,
        "PREREAD_S3_ACCESS_KEY": s3.access_key,
        "PREREAD_S3_SECRET_KEY": s3.secret_key,
    }
    return Backends(environ, shared_folder=False)


@pytest.fixture
def site(
    tmp_path: Path, backends: Backends, broker: LocalBroker, embedded_folder: Path
) -> Iterator[Site]:
    """One API, two workers and the beat, ready."""
    site = Site(tmp_path, backends, broker, embedded_folder)
    try:
        site.start("serve")
        site.start("worker", "worker-1")
        site.start("worker", "worker-2")
        site.start("beat")
        site.wait_ready()
        yield site
    finally:
        site.stop()
