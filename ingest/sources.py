"""Where files come from: a folder on disk, or a git repository at a commit. Both list first, then read."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import url2pathname

from ingest.detect import is_binary
from storage.errors import FileError, UserError

FILE_BYTES = 100 << 20
_LFS = b"version https://git-lfs.github.com/spec/"
_LONGEST_LINE = 20_000  # bytes: a script or style sheet with such a line was minified
_MINIFIABLE = (".js", ".mjs", ".cjs", ".css")


@dataclass(frozen=True)
class Entry:
    """A file on offer. `path` is relative with `/`; undecodable bytes in it are kept as lone surrogates."""

    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Left:
    """A file left out, and why."""

    path: str
    reason: str


class FolderSource:
    """The files under a folder. Symlinks are never followed."""

    def __init__(self, path: str | Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._root = os.fspath(path)
        self._cap = file_bytes
        self.skipped: list[Left] = []
        if not os.path.isdir(self._root):
            raise UserError(f"There is no folder {self._root!r}.")

    def manifest(self) -> list[Entry]:
        """All files in order of their paths; afterwards `skipped` says what was left out."""
        self.skipped = []
        entries = [entry for path in self._walk() if (entry := self._entry(path)) is not None]
        return sorted(entries, key=lambda entry: entry.path)

    def read(self, path: str) -> bytes:
        """The bytes of a file of the manifest. Raises FileError if it is gone or no longer a plain file."""
        parts = path.split("/")
        if not path or path.startswith("/") or ".." in parts or "\0" in path:
            raise FileError(f"{path!r} is not a path inside the folder.", code="invalid_file")
        try:
            return _read_plain(self._root, parts, self._cap)
        except OSError as error:
            raise FileError(f"{path!r} cannot be read: {error.strerror}.", code="invalid_file") from error

    def _walk(self) -> Iterator[str]:
        stack = [""]
        while stack:
            folder = stack.pop()
            try:
                found = list(os.scandir(os.path.join(self._root, folder)))
            except OSError as error:
                self.skipped.append(Left(folder, f"cannot be listed: {error.strerror}"))
                continue
            for item in found:
                path = f"{folder}/{item.name}" if folder else item.name
                if item.is_symlink():
                    self.skipped.append(Left(path, "symlink"))
                elif item.name == ".git":
                    self.skipped.append(Left(path, "git's own files"))
                elif item.is_dir(follow_symlinks=False):
                    stack.append(path)
                elif item.is_file(follow_symlinks=False):
                    yield path
                else:
                    self.skipped.append(Left(path, "not a regular file"))

    def _entry(self, path: str) -> Entry | None:
        try:
            data = _read_plain(self._root, path.split("/"), self._cap)
        except FileError:
            self.skipped.append(Left(path, f"larger than {self._cap} bytes"))
            return None
        except OSError as error:
            self.skipped.append(Left(path, f"cannot be read: {error.strerror}"))
            return None
        return _checked(path, data, self.skipped)


def _read_plain(root: str, parts: list[str], cap: int) -> bytes:
    """A file's bytes, opening each folder on the way without following links: none can be slipped in."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Without O_NONBLOCK a named pipe would hold us here for ever.
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        data = file.read(cap + 1)
    if len(data) > cap:
        raise FileError(f"The file is larger than {cap} bytes.", code="too_large")
    return data


def _checked(path: str, data: bytes, skipped: list[Left]) -> Entry | None:
    """The entry for a file's bytes, or None and the reason among `skipped`."""
    if data.startswith(_LFS):
        skipped.append(Left(path, "git LFS pointer; the file itself is not here"))
    elif is_binary(data):
        skipped.append(Left(path, "binary"))
    elif path.endswith(_MINIFIABLE) and max(map(len, data.split(b"\n"))) > _LONGEST_LINE:
        skipped.append(Left(path, "minified"))
    else:
        return Entry(path, hashlib.sha256(data).hexdigest(), len(data))
    return None


class GitSource:
    """The files of a local git repository at one commit, read from its objects: no checkout, no network."""

    def __init__(self, repository: str | Path, ref: str = "HEAD", *, file_bytes: int = FILE_BYTES) -> None:
        self._repository = _local(os.fspath(repository))
        self._cap = file_bytes
        self._objects: dict[str, str] = {}
        self.skipped: list[Left] = []
        if not os.path.isdir(self._repository):
            raise UserError(f"There is no git repository {self._repository!r}.")
        found = self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        self.commit = found.decode("ascii").strip()

    def manifest(self) -> list[Entry]:
        """All files of the commit in order of their paths; afterwards `skipped` says what was left out."""
        self.skipped = []
        self._objects = {}
        wanted: list[tuple[str, str]] = []
        for record in self._git("ls-tree", "-r", "-l", "-z", "--full-tree", self.commit).split(b"\0")[:-1]:
            head, _, name = record.partition(b"\t")
            mode, _, identity, size = head.split()
            path = os.fsdecode(name)
            if reason := _git_refusal(mode, size, self._cap):
                self.skipped.append(Left(path, reason))
            else:
                wanted.append((path, identity.decode("ascii")))
        entries = [_checked(path, data, self.skipped) for path, data in self._contents(wanted)]
        kept = sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.path)
        names = {entry.path for entry in kept}
        self._objects = {path: identity for path, identity in wanted if path in names}
        return kept

    def read(self, path: str) -> bytes:
        """The bytes of a file of the manifest, at the commit."""
        if not self._objects:
            self.manifest()
        if path not in self._objects:
            raise FileError(f"{path!r} is not among the commit's files.", code="invalid_file")
        return self._git("cat-file", "blob", self._objects[path])

    def _contents(self, wanted: list[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
        """Each file's bytes, through one git process for all."""
        process = subprocess.Popen(
            [*self._command(), "cat-file", "--batch"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_git_environment(),
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            for path, identity in wanted:
                process.stdin.write(identity.encode("ascii") + b"\n")
                process.stdin.flush()
                head = process.stdout.readline().split()
                if len(head) != 3:
                    self.skipped.append(Left(path, "its object is missing"))
                    continue
                yield path, process.stdout.read(int(head[2]) + 1)[:-1]
            process.stdin.close()

    def _command(self) -> list[str]:
        # Hooks, fsmonitor and the like are programs that a repository names: none of them may run.
        safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never"]
        return ["git", "--no-replace-objects", *safe, "-C", self._repository]

    def _git(self, *arguments: str) -> bytes:
        try:
            done = subprocess.run(
                [*self._command(), *arguments],
                capture_output=True,
                check=True,
                timeout=600,
                env=_git_environment(),
            )
        except subprocess.CalledProcessError as error:
            what = error.stderr.decode("utf-8", "replace").strip().splitlines()
            raise UserError(f"git cannot read this: {what[-1] if what else 'no such commit'}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"git could not be run: {error}") from error
        return done.stdout


def _local(repository: str) -> str:
    """The path of a repository given as a path or a file URL."""
    scheme, separator, rest = repository.partition("://")
    if not separator:
        return os.path.abspath(repository)
    if scheme != "file":
        raise UserError("Only repositories on this machine can be read; clone this one and give its path.")
    return url2pathname(rest.removeprefix("localhost"))


def _git_refusal(mode: bytes, size: bytes, cap: int) -> str:
    if mode == b"160000":
        return "submodule"
    if mode == b"120000":
        return "symlink"
    return f"larger than {cap} bytes" if size.isdigit() and int(size) > cap else ""


def _git_environment() -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "SYSTEMROOT") if key in os.environ}
    return {
        **kept,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C",
    }
