"""A git repository on another machine as a source: the one commit is fetched into a folder, then read like a local one.

git itself fetches, under no configuration but ours: no hooks, helpers, prompts, redirects, submodules or protocols other than
the URL's own, connected to the address that was checked.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from functools import cache
from pathlib import Path

from ingest.egress import Place
from ingest.fetch import FetchFailed
from ingest.sources.credentials import Credential
from ingest.sources.git import GitSource, git_environment
from ingest.sources.scratch import fresh_folder
from ingest.sources.types import Asker, Entry, Left, Reach, Seen
from storage.errors import FileError, UserError

MOST_BYTES = 4 << 30  # of one commit, as git packs it
MOST_SECONDS = 3600.0
LOOK_SECONDS = 0.2
PINS_SINCE = (2, 37)  # http.curloptResolve; an older git would ignore it and look the host up once more
_REF = re.compile(r"(?![-+])(?!.*(\.\.|@\{))[^\x00-\x20\x7f~^:?*\[\\]{1,200}")
_WANTED = "refs/preread/wanted"
_SETTINGS = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.bigFileThreshold=1m", "gc.auto=0", "maintenance.auto=false",
    "fetch.unpackLimit=1", "fetch.recurseSubmodules=false", "transfer.bundleURI=false", "http.followRedirects=false",
    "http.proxy=", "http.lowSpeedLimit=1000", "http.lowSpeedTime=30", "protocol.version=2",
)  # fmt: skip


class RemoteGitSource:
    """The files of a repository at a branch, tag or commit, fetched anew for each listing."""

    def __init__(
        self,
        url: str,
        ref: str,
        reach: Reach,
        asker: Asker,
        credential: Credential | None = None,
        *,
        most_bytes: int = MOST_BYTES,
        most_seconds: float = MOST_SECONDS,
    ) -> None:
        reach.hosts.check(url)
        if not _REF.fullmatch(ref):
            raise UserError(f"{ref!r} is no branch, tag or commit of git")
        self._url, self._ref, self._reach, self._asker, self._credential = url, ref, reach, asker, credential
        self._most_bytes, self._most_seconds = most_bytes, most_seconds
        self._folder: Path | None = None
        self._commit: GitSource | None = None
        self.skipped: list[Left] = []
        self.seen: dict[str, Seen] = {}

    def manifest(self) -> list[Entry]:
        """See Source. Raises FetchFailed, HostRefused, UserError."""
        self.close()
        self._commit = GitSource(self._fetched(), _WANTED, check=self._asker.check)
        entries = self._commit.manifest()
        self.skipped = self._commit.skipped
        return entries

    def read(self, path: str) -> bytes:
        """See Source."""
        if self._commit is None:
            raise FileError("the repository has not been listed", code="invalid_file")
        return self._commit.read(path)

    def close(self) -> None:
        """See Source."""
        self._commit = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _fetched(self) -> Path:
        """A bare repository with the wanted commit."""
        if git_version() < PINS_SINCE:
            raise UserError(f"this server's git is too old to fetch safely: {'.'.join(map(str, PINS_SINCE))} or newer is needed")
        try:
            place = self._reach.hosts.locate(self._url)
        except OSError:
            raise FetchFailed("the repository's host was not found") from None
        self._folder = fresh_folder(self._reach.scratch)
        repository = self._folder / "repository"
        subprocess.run(
            ["git", "init", "--quiet", "--bare", "--template=", str(repository)],
            check=True, capture_output=True, env=self._environment(place),
        )  # fmt: skip
        settings = [*_SETTINGS, *_pinned(place)]
        fetch = ["fetch", "--quiet", "--depth=1", "--no-tags", "--no-write-fetch-head", "--end-of-options"]
        command = ["git", "-C", str(repository), *(word for each in settings for word in ("-c", each)), *fetch]
        self._watched([*command, str(place.url), f"+{self._ref}:{_WANTED}"], place)
        return repository

    def _environment(self, place: Place) -> dict[str, str]:
        assert self._folder is not None
        # A header by the environment: arguments can be read by every user of the machine.
        header = {"GIT_CONFIG_KEY_0": "http.extraHeader", "GIT_CONFIG_VALUE_0": f"Authorization: {self._credential.basic}"} if (
            self._credential
        ) else {}  # fmt: skip
        certificates = {k: os.environ[k] for k in ("GIT_SSL_CAINFO",) if k in os.environ}
        return {
            **git_environment(),
            **certificates,
            **header,
            "HOME": str(self._folder),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_COUNT": "1" if header else "0",
            "GIT_ALLOW_PROTOCOL": place.url.scheme,
            "GIT_PROTOCOL_FROM_USER": "0",
            "GIT_ASKPASS": "",
        }

    def _watched(self, command: list[str], place: Place) -> None:
        """Run git until it ends; end it, with its children, when it writes or takes too much, or the work is cancelled."""
        assert self._folder is not None
        end, complaints = time.monotonic() + self._most_seconds, self._folder / "complaints"
        with complaints.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=out,
                env=self._environment(place), start_new_session=True,
            )  # fmt: skip
        try:
            ended = False
            while not ended:
                ended = process.poll() is not None  # what came between two looks is counted too
                self._asker.check()
                if _size(self._folder) > self._most_bytes:
                    raise FetchFailed(f"the repository's commit is larger than {self._most_bytes} bytes", code="too_large")
                if time.monotonic() > end:
                    raise FetchFailed(f"{place.host} took too long")
                try:
                    process.wait(LOOK_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            raise FetchFailed(f"git could not fetch from {place.host}: {_complaint(complaints)}")


def _pinned(place: Place) -> list[str]:
    """The setting by which git's curl connects to the checked addresses, and looks nothing up."""
    if place.host in place.addresses:
        return []
    addresses = ",".join(f"[{each}]" if ":" in each else each for each in place.addresses)
    return [f"http.curloptResolve={place.host}:{place.port}:{addresses}"]


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # git renames its packs
                continue
    return total


def _complaint(file: Path) -> str:
    """git's own last word. What the other side says, which git prefixes with `remote:`, is not repeated."""
    with file.open("rb") as complaints:
        lines = complaints.read(1 << 16).decode("utf-8", "replace").splitlines()
    own = [line for line in lines if line.startswith(("fatal:", "error:"))]
    return own[-1].partition(":")[2].strip()[:200] if own else "it said nothing"


@cache
def git_version() -> tuple[int, ...]:
    """Raises UserError where there is no git."""
    try:
        said = subprocess.run(["git", "version"], capture_output=True, check=True, timeout=60, text=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError("git is not installed on this server") from error
    return tuple(map(int, re.findall(r"\d+", said)[:2]))
