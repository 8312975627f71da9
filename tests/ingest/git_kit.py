"""git's own server for HTTP, `git http-backend`, behind the loopback web server; and repositories to serve."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures_web import Asked, Reply


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def repository(folder: Path, files: dict[str, str | bytes]) -> Path:
    """A repository with one commit on `main`."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    commit(folder, files)
    return folder


def commit(folder: Path, files: dict[str, str | bytes]) -> str:
    """A commit of exactly these files; its id."""
    for item in folder.iterdir():
        if item.name != ".git":
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data if isinstance(data, bytes) else data.encode())
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "next")
    return git(folder, "rev-parse", "HEAD")


def backend(root: Path) -> Callable[[Asked], Reply]:
    """Serves every repository below `root`; skips the test where git has no HTTP server."""
    program = Path(subprocess.run(["git", "--exec-path"], capture_output=True, check=True, text=True).stdout.strip())
    if not (program / "git-http-backend").exists():
        pytest.skip("git http-backend is not installed")

    def answer(asked: Asked) -> Reply:
        path, _, query = asked.path.partition("?")
        environment = {
            "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(root), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path,
            "QUERY_STRING": query, "REQUEST_METHOD": asked.method, "CONTENT_TYPE": asked.headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(asked.body)), "HTTP_CONTENT_ENCODING": asked.headers.get("content-encoding", ""),
            "GIT_PROTOCOL": asked.headers.get("git-protocol", ""), "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        done = subprocess.run([str(program / "git-http-backend")], input=asked.body, env=environment, capture_output=True)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode("latin-1").split("\r\n") if ": " in line)
        status = int(headers.pop("Status", "200").split()[0])
        return Reply(body, status, headers)

    return answer
