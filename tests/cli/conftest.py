"""The command line as a child process, and a whole Preread started by `preread up`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import Running, Shell

from serving.local_broker import free_port


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREREAD_")}
    return Shell({**kept, "PREREAD_DATA_DIR": str(tmp_path / "data")})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, embedded_folder: Path) -> Iterator[Running]:
    """`preread up` on a folder of its own, ready."""
    folder = tmp_path_factory.mktemp("up")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREREAD_")}
    shell = Shell(
        {
            **kept,
            "PREREAD_DATA_DIR": str(folder / "data"),
            "PREREAD_PORT": str(free_port()),
            "PREREAD_MODEL": str(embedded_folder),
            "PREREAD_THREADS": "1",
            "PREREAD_SOURCE_ROOTS": str(folder / "sources"),
        }
    )
    (folder / "sources").mkdir()
    log = (folder / "up.log").open("w")
    process = subprocess.Popen(
        shell.argv("up", "--json"), env=shell.environ, stdout=subprocess.PIPE, stderr=log, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / "up.log").read_text()
        yield Running(shell, process, json.loads(line), folder / "data", folder / "sources")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        log.close()
