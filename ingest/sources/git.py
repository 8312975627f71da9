"""A git repository on this machine as a source, at one commit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import url2pathname

from ingest.sources.types import FILE_BYTES, Entry, Left, Seen, checked
from storage.errors import FileError, UserError


class GitSource:
    """The files of a local git repository at one commit, read from its objects: no checkout, no network."""

    def __init__(
        self,
        repository: str | Path,
        ref: str = "HEAD",
        *,
        file_bytes: int = FILE_BYTES,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._repository = local_path(os.fspath(repository))
        self._cap, self._check = file_bytes, check
        self._objects: dict[str, str] = {}
        self.skipped: list[Left] = []
        self.seen: dict[str, Seen] = {}
        if not os.path.isdir(self._repository):
            raise UserError(f"There is no git repository {self._repository!r}.")
        found = self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        self.commit = found.decode("ascii").strip()

    def manifest(self) -> list[Entry]:
        """See Source."""
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
        entries = [checked(path, data, self.skipped) for path, data in self._contents(wanted)]
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

    def close(self) -> None:
        """See Source."""

    def _contents(self, wanted: list[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
        """Each file's bytes, through one git process for all."""
        process = subprocess.Popen(
            [*self._command(), "cat-file", "--batch"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=git_environment(),
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            for path, identity in wanted:
                self._check()
                process.stdin.write(identity.encode("ascii") + b"\n")
                process.stdin.flush()
                head = process.stdout.readline().split()
                if len(head) != 3:
                    self.skipped.append(Left(path, "cannot be read: its object is missing", unread=True))
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
                env=git_environment(),
            )
        except subprocess.CalledProcessError as error:
            what = error.stderr.decode("utf-8", "replace").strip().splitlines()
            raise UserError(f"git cannot read this: {what[-1] if what else 'no such commit'}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"git could not be run: {error}") from error
        return done.stdout


def local_path(repository: str) -> str:
    """The path of a repository given as a path or a file URL."""
    scheme, separator, rest = repository.partition("://")
    if not separator:
        return os.path.abspath(repository)
    if scheme != "file":
        raise UserError('this is no repository on this machine; one on another is named by its "url"')
    return url2pathname(rest.removeprefix("localhost"))


def _git_refusal(mode: bytes, size: bytes, cap: int) -> str:
    if mode == b"160000":
        return "submodule"
    if mode == b"120000":
        return "symlink"
    return f"larger than {cap} bytes" if size.isdigit() and int(size) > cap else ""


def git_environment() -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "SYSTEMROOT") if key in os.environ}
    return {
        **kept,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C",
    }
