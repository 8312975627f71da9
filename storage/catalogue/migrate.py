"""Runs the alembic scripts of this package, one process at a time. They lead forward only: the way back is the backup that
was made before (docs/operations.md)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from storage.errors import UserError

ADVISORY_LOCK = 0x70726561  # any number, as long as every version of Preread uses the same


def upgrade(engine: Engine) -> None:
    """Upgrade to the newest revision in one transaction; a second process waits, and then finds it done."""
    newest = _newest()
    with engine.connect() as connection:
        if _revision(connection) == newest:
            return
    with engine.begin() as connection:  # BEGIN IMMEDIATE on SQLite: the lock between processes
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
            _need_vector_extension(connection)
        if _revision(connection) != newest:
            config = alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@cache
def _newest() -> str | None:
    """The revision that this code expects."""
    return ScriptDirectory.from_config(alembic_config()).get_current_head()


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _need_vector_extension(connection: Connection) -> None:
    if connection.scalar(text("SELECT count(*) FROM pg_extension WHERE extname = 'vector'")):
        return
    try:
        with connection.begin_nested():
            connection.execute(text("CREATE EXTENSION IF NOT EXISTS vector"))
    except DBAPIError as error:
        raise UserError(
            "This PostgreSQL has no pgvector, or this role may not install it. Install pgvector, then run "
            "'CREATE EXTENSION vector' in this database as an administrator."
        ) from error
