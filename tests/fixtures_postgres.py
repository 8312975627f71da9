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
from contextlib import contextmanager
from pathlib import Path

import pytest
from fixtures_work import empty_catalogue
from promised import missing

from storage.catalogue.engine import migrate, parse_url


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


@contextmanager
def _database(postgres_server: str, template: str = "template1") -> Iterator[str]:
    """The URL of a new database, a copy of that one."""
    import psycopg

    name = f"t{uuid.uuid4().hex[:12]}"
    server = postgres_server.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield postgres_server.replace("/postgres?", f"/{name}?")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    with _database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def _migrated(postgres_server: str) -> Iterator[str]:
    """The name of a migrated database: copied, which is quicker than to migrate one per test."""
    with _database(postgres_server) as url:
        migrate(url)
        yield str(parse_url(url).database)


@pytest.fixture
def postgres_catalogue(postgres_server: str, _migrated: str) -> Iterator[str]:
    """The URL of a database with Preread's tables, all empty."""
    with _database(postgres_server, _migrated) as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def catalogue_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same of each database that may hold the catalogue."""
    if request.param == "sqlite":
        return empty_catalogue(tmp_path / "catalogue.db")
    return str(request.getfixturevalue("postgres_catalogue"))
