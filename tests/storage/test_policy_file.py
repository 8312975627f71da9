"""The operator's file in force: read again when it changes, never replaced by a broken one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from storage.errors import UserError
from storage.policy.file import PolicyFile
from storage.policy.types import DocumentFacts

DOC = DocumentFacts("t", "vs_1", "c", "doc-1", "a.md")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def pin(tier: str) -> str:
    return f"rules:\n- {{pin: {tier}}}\n"


def said(file: PolicyFile) -> str | None:
    return file.current().decide(DOC, 0).actions.pin


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(pin("memory"))
    return path


def test_no_file_says_nothing() -> None:
    assert said(PolicyFile(None)) is None


def test_a_change_is_in_force_without_a_restart(path: Path) -> None:
    file = PolicyFile(path, Clock())
    first = file.version
    assert said(file) == "memory"
    path.write_text(pin("disk"))
    assert said(file) == "disk"
    assert file.version != first
    assert (file.reloads, file.error) == (1, None)


def test_a_change_that_keeps_time_and_size_is_seen(path: Path) -> None:
    path.write_text("rules:\n- {pin: disk  }\n")
    file = PolicyFile(path, Clock())
    before = path.stat()
    path.write_text("rules:\n- {pin: memory}\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert said(file) == "memory"


def test_a_file_replaced_by_rename_is_seen(path: Path, tmp_path: Path) -> None:
    file = PolicyFile(path, Clock())
    (tmp_path / "new").write_text(pin("disk"))
    (tmp_path / "new").rename(path)
    assert said(file) == "disk"


def test_a_broken_version_leaves_the_old_one_in_force_and_says_so(path: Path) -> None:
    file = PolicyFile(path, Clock())
    version = file.version
    path.write_text(pin("ram"))
    with capture_logs() as logged:
        assert said(file) == said(file) == "memory"
    assert file.version == version
    assert "pin cannot be 'ram'" in str(file.error)
    assert file.failures == 1, "one broken version is one failure, however often it is looked at"
    assert [entry["event"] for entry in logged] == ["policy_not_read"]
    path.write_text(pin("memory"))
    assert said(file) == "memory"
    assert file.error is None, "the old version again is no mistake"
    assert file.reloads == 0


def test_a_file_that_vanishes_leaves_its_last_version_in_force(path: Path) -> None:
    file = PolicyFile(path, Clock())
    text = path.read_text()
    path.unlink()
    assert said(file) == "memory"
    assert "cannot be read" in str(file.error)
    path.write_text(text)
    assert said(file) == "memory"
    assert file.error is None


def test_it_is_looked_at_once_a_second_at_most(path: Path) -> None:
    clock = Clock()
    file = PolicyFile(path, lambda: clock.now)
    path.write_text(pin("disk"))
    assert said(file) == "memory"
    clock.now = 1.0
    assert said(file) == "disk"


def test_a_broken_or_absent_file_stops_the_start(path: Path, tmp_path: Path) -> None:
    path.write_text(pin("ram"))
    for one in (path, tmp_path / "nowhere.yaml"):
        with pytest.raises(UserError):
            PolicyFile(one)
