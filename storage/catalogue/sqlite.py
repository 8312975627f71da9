"""SQLite as the catalogue needs it: loadable extensions, WAL, foreign keys."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from storage.errors import StorageUnavailable, UserError

WAL_PATIENCE = 30.0
# secure_delete: what is deleted is overwritten in the file, not merely forgotten.
SETTINGS = (
    "foreign_keys = ON",
    "synchronous = FULL",
    "secure_delete = ON",
    "temp_store = MEMORY",
    "cache_size = -32768",
)


def driver() -> Any:
    """A DB-API module whose SQLite can load extensions: pysqlite3 where installed, else Python's own."""
    for name in ("pysqlite3", "sqlite3"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module.Connection, "enable_load_extension"):
            return module
    raise UserError(
        "This Python's SQLite cannot load extensions, which vector search needs: "
        "pip install pysqlite3-binary, or use a PostgreSQL catalogue."
    )


def make_parent(path: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The catalogue's folder cannot be made: {error.strerror or error}.") from error


def prepare(connection: Any, _record: Any = None) -> None:
    """Runs on each new connection."""
    import sqlite_vec

    connection.isolation_level = None  # transactions begin where we say
    connection.enable_load_extension(True)
    sqlite_vec.load(connection)
    connection.enable_load_extension(False)
    _use_wal(connection)
    for setting in SETTINGS:
        connection.execute(f"PRAGMA {setting}")


def _use_wal(connection: Any) -> None:
    """The switch to WAL does not wait for other connections as statements do, so the wait is ours."""
    until = time.monotonic() + WAL_PATIENCE
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
                return
            if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] == "wal":
                return
        except Exception as error:
            if not is_busy(error):
                raise
        if time.monotonic() > until:
            raise StorageUnavailable(
                "The catalogue's file cannot be switched to WAL: another process holds it."
            )
        time.sleep(0.02)


def is_busy(error: Any) -> bool:
    """Whether SQLite gave up waiting for another writer."""
    return type(error).__name__ == "OperationalError" and "is locked" in str(error)


def is_full(error: Any) -> bool:
    """Whether there is no room left for the file; what was being written is rolled back."""
    return type(error).__name__ == "OperationalError" and "disk is full" in str(error)
