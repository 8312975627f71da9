"""`postgres_url`: a new, empty database in a real PostgreSQL with pgvector, from the wheel `pgserver`.

The wheel's own launcher changes users and permissions when run as root, so its binaries are run directly
here; as root they run as `nobody`, because PostgreSQL refuses root.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from promised import missing


def _binaries() -> Path:
    spec = importlib.util.find_spec("pgserver")
    folder = Path(spec.origin).parent / "pginstall" / "bin" if spec and spec.origin else Path("absent")
    if not (folder / "postgres").exists():
        missing("postgresql", "pgserver's PostgreSQL is not installed")
    return folder


def _run(command: list[str | Path], user: str) -> None:
    switch = {"user": user, "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    done = subprocess.run(  # a daemon keeps its parent's pipes open, so output goes nowhere
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=60,
        cwd="/",
        **switch,
    )
    if done.returncode:
        pytest.skip(f"PostgreSQL did not start: {Path(command[0]).name} returned {done.returncode}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of the server's own database."""
    binaries = _binaries()
    user = "nobody" if os.geteuid() == 0 else getpass.getuser()
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's path holds 107 bytes
    data = folder / "data"
    if os.geteuid() == 0:
        shutil.chown(folder, user)
    options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off -c max_connections=60"
    try:
        _run([binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"], user)
        control = [binaries / "pg_ctl", "-D", data, "-w", "-t", "30"]
        _run([*control, "-l", folder / "log", "-o", options, "start"], user)
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
        finally:
            _run([*control, "-m", "immediate", "stop"], user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    import psycopg

    name = f"t{uuid.uuid4().hex[:12]}"
    server = postgres_server.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield postgres_server.replace("/postgres?", f"/{name}?")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
