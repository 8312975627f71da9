"""A store's address is understood, or refused with a line that says what to write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from storage.errors import StorageUnavailable, UserError
from storage.folder import FolderStore
from storage.objects import open_store


def test_a_path_and_a_file_url_are_the_same_folder(tmp_path):
    folder = tmp_path / "with space" / "objects"
    one, other = open_store(str(folder)), open_store("file://" + str(folder).replace(" ", "%20"))
    one.put("a/b", [b"x"])
    assert isinstance(other, FolderStore)
    assert list(other.list("")) == ["a/b"]


def test_a_relative_path_starts_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_store("data/objects").put("a", [b"x"])
    assert Path("data/objects").is_dir()


@pytest.mark.services
def test_an_s3_url_makes_its_bucket_and_keeps_to_its_prefix(s3_server):
    keys = {"s3_access_key": s3_server.access_key, "s3_secret_key": s3_server.secret_key}
    store = open_store("s3://opened-here/some/prefix/", s3_endpoint=s3_server.endpoint, **keys)
    whole = open_store("s3://opened-here", s3_endpoint=s3_server.endpoint, **keys)
    store.put("a", [b"x"])
    assert list(whole.list("")) == ["some/prefix/a"]
    for each in (store, whole):
        each.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://host/bucket",
        "s3:///prefix",
        "s3://B/prefix",
        "s3://bucket/../x",
        "s3://bucket/a b",
        "s3://key:hush@bucket/prefix",
        "s3://bucket/prefix?x=1",
        "file://elsewhere/path",
        "file://",
        "file:///",
    ],
)
def test_an_address_that_means_nothing_is_refused_without_repeating_secrets(url):
    with pytest.raises(UserError) as caught:
        open_store(url)
    assert "hush" not in str(caught.value)


def test_one_s3_key_without_the_other_is_refused():
    with pytest.raises(UserError, match="both"):
        open_store("s3://bucket", s3_access_key="only")


def test_a_server_that_is_not_there_is_unavailable(monkeypatch):
    monkeypatch.setattr("storage.retry.time.sleep", lambda seconds: None)
    keys = {"s3_access_key": "k", "s3_secret_key": "hush-hush"}
    with pytest.raises(StorageUnavailable) as caught:
        open_store("s3://bucket", s3_endpoint="http://127.0.0.1:1", **keys)
    assert "hush" not in str(caught.value)


def test_a_folder_is_opened_without_importing_boto3(tmp_path):
    code = "import sys, storage.objects as o; o.open_store(sys.argv[1]); sys.exit('boto3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0


def test_boto3_is_imported_for_s3_only():
    root = Path(__file__).parents[2]
    users = {
        path.relative_to(root).as_posix()
        for room in ("storage", "ingest", "precompute", "retrieval", "serving")
        for path in (root / room).rglob("*.py")
        if "import boto" in path.read_text() or "from boto" in path.read_text()
    }
    ours = {f"storage/{name}.py" for name in ("s3", "s3_errors", "s3_sign", "s3_upload")}
    assert users == {*ours, "ingest/sources/s3.py"}
    assert "boto" not in (root / "ingest/sources/__init__.py").read_text().split("def _s3")[0], "it is loaded when a source is"
