"""Object stores as fixtures; every test of behaviour common to them runs over both."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_reads_kit import connect, root, running_server, server  # noqa: F401 - fixtures

from storage.folder import FolderStore
from storage.s3 import S3Store
from storage.sealed import SealedStore
from storage.types import ObjectStore


@pytest.fixture(scope="session")
def s3_root(s3_server) -> Iterator[S3Store]:
    """The bucket that all tests share."""
    keys = {"access_key": s3_server.access_key, "secret_key": s3_server.secret_key}
    store = S3Store("conformance", "test", endpoint=s3_server.endpoint, **keys)
    store.ensure_bucket()
    yield store
    store.close()


@pytest.fixture
def s3_store(s3_root: S3Store) -> S3Store:
    """An empty store below a prefix of its own, with the root's client: making one takes half a second."""
    store = copy.copy(s3_root)
    store._prefix = f"test/{uuid.uuid4().hex}/"
    return store


@pytest.fixture(params=["folder", "sealed", pytest.param("s3", marks=pytest.mark.services)])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty object store of each kind."""
    if request.param == "s3":
        return request.getfixturevalue("s3_store")
    folder = FolderStore(tmp_path / "objects")
    return SealedStore(folder, [b"k" * 32], owner=lambda name: "t1") if request.param == "sealed" else folder
