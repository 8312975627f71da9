"""`preread storage`: what an operator types after an accident."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ingest.files import store_file
from serving.cli import app
from serving.cli_server import first_key
from serving.settings import load_settings
from storage.catalogue.engine import open_catalogue
from storage.errors import NotFound, UserError
from storage.folder import FolderStore
from storage.objects import open_store


def run(*words: str, code: int = 0) -> str:
    """A command in this process, which is quicker than one of its own; what it prints. Raises what it refuses with."""
    done = CliRunner().invoke(app, ["storage", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def as_json(*words: str) -> Any:
    return json.loads(run(*words, "--json"))


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PREREAD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def installed(data: Path) -> tuple[FolderStore, Path]:
    """The store of a data folder with one file, and one orphan that is a week old; and where the file's bytes lie."""
    settings = load_settings()
    first_key(settings)
    catalogue, objects = open_catalogue(settings.database), open_store(settings.objects)
    assert isinstance(objects, FolderStore)
    file = store_file(catalogue, objects, "default", "a.txt", b"twelve bytes")
    catalogue.close()
    orphan = "kv/ab/" + "ab" * 32
    objects.put(orphan, [b"orphan"])
    then = time.time() - 7 * 86400
    os.utime(objects._path(orphan), (then, then))
    [raw] = objects.list("raw/")
    assert raw.endswith(file.sha256)
    return objects, objects._path(raw)


def test_verify_and_gc(installed: tuple[FolderStore, Path]) -> None:
    objects, raw = installed
    found = as_json("verify")
    assert (found["raw"]["rows"], found["kv"]["orphans"], found["unrepaired"]) == (1, 1, 0)
    assert as_json("gc", "--grace-hours", "1000")["young"] == 1
    assert as_json("gc") == {"taken": 1, "bytes": 6, "young": 0, "uploads": 0}
    assert len(list(objects.list(""))) == 1
    raw.write_bytes(b"twelve bytez")
    assert "damaged: file-" in run("verify", "--repair", code=1)


@pytest.mark.usefixtures("installed")
def test_quota_is_shown_and_set() -> None:
    assert run("quota") == "default: 12 B no limit (KV 0 B, files 12 B)\n"
    assert as_json("quota", "--set", "1.5GB")["limit_bytes"] == 1_500_000_000
    assert as_json("quota")["limit_bytes"] == 1_500_000_000
    assert as_json("quota", "--set", "none")["limit_bytes"] is None
    with pytest.raises(UserError, match="no size"):
        run("quota", "--set", "much")
    with pytest.raises(NotFound, match="no tenant 'x'"):
        run("quota", "--tenant", "x")


def test_encryption_is_turned_on_and_the_key_is_rotated(
    installed: tuple[FolderStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, raw = installed
    with pytest.raises(UserError, match="PREREAD_ENCRYPTION_KEYS"):
        run("rekey")
    monkeypatch.setenv("PREREAD_ENCRYPTION_KEYS", "master")
    assert "damaged: file-" in run("verify", code=1), "it is not believed unsealed"
    assert as_json("rekey") == {"rekeyed": 2, "unchanged": 0, "failed": 0}
    assert b"twelve" not in raw.read_bytes()
    assert as_json("verify")["unrepaired"] == 0
    monkeypatch.setenv("PREREAD_ENCRYPTION_KEYS", f"{'n' * 40},master")
    assert as_json("verify")["unrepaired"] == 0, "what the old key has sealed is still read"
    assert as_json("rekey")["rekeyed"] == 2
    monkeypatch.setenv("PREREAD_ENCRYPTION_KEYS", "n" * 40)
    assert as_json("verify")["unrepaired"] == 0
    monkeypatch.setenv("PREREAD_ENCRYPTION_KEYS", "short")
    with pytest.raises(UserError, match="32 characters"):
        run("verify")
