"""Folders and git commits: what they offer, what they leave out."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from ingest.sources import Entry, FolderSource, GitSource
from storage.errors import Cancelled, FileError, UserError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, check=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "docs"
    for path, data in {
        "a/report.txt": b"same", "b/report.txt": b"same", "日本/ü.md": b"# x",
        "wide.txt": "breit".encode("utf-16"),
        "image.png": b"\x89PNG\0\0", "big.txt": b"x" * 2000, "doc.pdf": b"%PDF-1.4\0", "big.lfs": LFS,
        "lib.min.js": b"x;" * 400, "mini.js": b"x;" * 20_000, ".git/config": b"[core]",
    }.items():  # fmt: skip
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def test_a_folder_lists_its_files_with_their_hashes(folder: Path) -> None:
    source = FolderSource(folder, file_bytes=1000)
    entries = source.manifest()
    assert [e.path for e in entries] == [
        "a/report.txt",
        "b/report.txt",
        "doc.pdf",
        "lib.min.js",
        "wide.txt",
        "日本/ü.md",
    ]
    assert entries[0] == Entry("a/report.txt", hashlib.sha256(b"same").hexdigest(), 4)
    assert source.read("b/report.txt") == b"same"
    assert source.read("日本/ü.md") == b"# x"


def test_what_a_folder_leaves_out_has_its_reason(folder: Path) -> None:
    (folder / "link.txt").symlink_to("/etc/passwd")
    (folder / "linked").symlink_to(folder / "a")
    os.mkfifo(folder / "pipe")
    source = FolderSource(folder, file_bytes=1000)
    source.manifest()
    assert {left.path: left.reason for left in source.skipped} == {
        ".git": "git's own files", "image.png": "binary", "big.txt": "larger than 1000 bytes",
        "big.lfs": "git LFS pointer; the file itself is not here", "mini.js": "larger than 1000 bytes",
        "link.txt": "symlink", "linked": "symlink", "pipe": "not a regular file",
    }  # fmt: skip
    wide = FolderSource(folder)
    wide.manifest()
    assert ("mini.js", "minified") in {(left.path, left.reason) for left in wide.skipped}


def test_a_name_that_is_no_unicode_comes_back_byte_for_byte(folder: Path) -> None:
    name = b"caf\xe9\xff.txt"
    Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(b"odd")
    source = FolderSource(folder)
    (entry,) = [e for e in source.manifest() if os.fsencode(e.path) == name]
    assert source.read(entry.path) == b"odd"


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "a/../../secret", "", "link.txt", "linked/report.txt"]
)
def test_a_path_that_leads_outside_is_refused(folder: Path, path: str) -> None:
    (folder.parent / "secret").write_bytes(b"no")
    (folder / "link.txt").symlink_to(folder.parent / "secret")
    (folder / "linked").symlink_to(folder / "a")
    with pytest.raises(FileError):
        FolderSource(folder).read(path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        FolderSource(tmp_path / "nothing")


@pytest.fixture
def repository(folder: Path) -> Path:
    (folder / ".git" / "config").unlink()
    (folder / ".git").rmdir()
    (folder / "link.txt").symlink_to("/etc/passwd")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    git(folder, "commit", "-q", "-m", "one")
    return folder


@pytest.mark.parametrize("kind", [FolderSource, GitSource])
def test_a_listing_that_nobody_wants_any_more_stops_between_two_files(repository: Path, kind: type) -> None:
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise Cancelled("the job was cancelled")

    with pytest.raises(Cancelled):
        kind(repository, check=check).manifest()
    assert len(looks) == 3


def test_git_lists_a_commit_and_not_the_working_tree(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    (repository / "a/report.txt").write_bytes(b"changed")
    git(repository, "commit", "-qam", "two")
    (repository / "a/report.txt").write_bytes(b"not committed")
    old, new = GitSource(repository, first, file_bytes=1000), GitSource(f"file://{repository}", "main")
    assert old.commit == first
    assert [e.path for e in old.manifest()] == [
        "a/report.txt", "b/report.txt", "doc.pdf", "lib.min.js", "wide.txt", "日本/ü.md",
    ]  # fmt: skip
    assert (old.read("a/report.txt"), new.read("a/report.txt")) == (b"same", b"changed")
    assert {left.path: left.reason for left in old.skipped} == {
        "image.png": "binary", "big.txt": "larger than 1000 bytes", "mini.js": "larger than 1000 bytes",
        "big.lfs": "git LFS pointer; the file itself is not here", "link.txt": "symlink", "sub": "submodule",
    }  # fmt: skip


@pytest.mark.parametrize("ref", ["--upload-pack=touch x", "-h", "no-such-branch", "HEAD:a/report.txt", ""])
def test_a_ref_that_names_no_commit_is_refused(repository: Path, ref: str) -> None:
    with pytest.raises(UserError):
        GitSource(repository, ref)


@pytest.mark.parametrize("url", ["https://example.org/x.git", "ext::sh -c x", "ssh://h/x", "nowhere"])
def test_only_repositories_on_this_machine_are_read(url: str) -> None:
    with pytest.raises(UserError):
        GitSource(url, "main")


def test_a_path_outside_the_commit_is_refused(repository: Path) -> None:
    with pytest.raises(FileError):
        GitSource(repository).read("../secret")


def test_an_empty_folder_has_no_files_and_a_folder_without_git_is_no_repository(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert FolderSource(tmp_path / "empty").manifest() == []
    with pytest.raises(UserError, match="git"):
        GitSource(tmp_path / "empty")


def test_a_program_the_repository_names_is_not_run(repository: Path) -> None:
    mark = repository.parent / "ran"
    git(repository, "config", "core.fsmonitor", f"touch {mark}")
    git(repository, "config", "core.sshCommand", f"touch {mark}")
    assert GitSource(repository).manifest()
    assert not mark.exists()
