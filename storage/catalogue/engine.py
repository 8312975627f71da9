"""The catalogue's door: one URL in, sessions in one transaction each out.

Durability on SQLite: WAL with `synchronous=FULL`, so that a commit that returned survives a kill of the
process and a loss of power (WAL with NORMAL survives only the former). It costs one fsync per commit, which
is why work is written in batches.

`read()` is one snapshot on both databases: a search never sees half of a commit. `write()` is BEGIN IMMEDIATE
on SQLite: it waits for its turn at the start, and never dead-locks half-way when two readers want to write.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from sqlalchemy import URL, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from storage.catalogue import sqlite
from storage.errors import Overloaded, StorageUnavailable, UserError

Dialect = Literal["sqlite", "postgresql"]
BUSY_SECONDS = 30.0
_DISK_FULL = "53100"
# PostgreSQL's: serialization failure, deadlock detected; another transaction has deleted what a new row belongs to, or has made
# the same row.
_OVERTAKEN = ("40001", "40P01", "23503", "23505")


class Catalogue:
    """A pool of connections to one database. Safe to share between threads, and across a fork."""

    def __init__(self, engine: Engine, dialect: Dialect, audit_key: bytes = b"") -> None:
        """`audit_key`: see `storage.catalogue.audit`; sessions carry it."""
        self.dialect: Dialect = dialect
        self.audit_key = audit_key
        self.engine = engine
        # Options make views on the same pool, not second pools.
        self._writing: Engine = engine
        self._reading: Engine
        if dialect == "sqlite":
            self._reading = engine.execution_options(sqlite_begin="read")
            self._writing = engine.execution_options(sqlite_begin="write")
        else:
            self._reading = engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        self._pid = os.getpid()
        self._turn = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session on one snapshot; nothing written in it is kept."""
        self._after_fork()
        with _errors_named(), Session(self._reading, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that commits when the block ends, and keeps nothing when it raises."""
        self._after_fork()
        with self._my_turn(), _errors_named(), self._writer() as session:
            with session.begin():
                session.connection()  # take the write lock now, not at the first statement
                yield session

    def _writer(self) -> Session:
        return Session(self._writing, expire_on_commit=False, info={"audit_key": self.audit_key})

    def ping(self) -> None:
        """Return if the database answers; raise StorageUnavailable if not."""
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        """On SQLite writers of one process queue here: its own waiting is by polling, and starves some."""
        if self.dialect != "sqlite":
            yield
            return
        if not self._turn.acquire(timeout=BUSY_SECONDS):
            raise Overloaded("The catalogue is busy with another write; try again.")
        try:
            yield
        finally:
            self._turn.release()

    def _after_fork(self) -> None:
        """A child must not use its parent's connections."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._turn = threading.Lock()
            self.engine.dispose(close=False)


def open_catalogue(url: str, audit_key: bytes = b"") -> Catalogue:
    """Open `sqlite:///path/to/file` or `postgresql://user@host/name`. `migrate(url)` makes the tables."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return Catalogue(_sqlite_engine(parsed), "sqlite", audit_key)
    return Catalogue(_postgresql_engine(parsed), "postgresql", audit_key)


def migrate(url: str) -> None:
    """Bring the tables up to date. Safe in several processes at once; quick when there is nothing to do."""
    from storage.catalogue.migrate import upgrade  # alembic is loaded by those who migrate only

    catalogue = open_catalogue(url)
    try:
        with _errors_named():
            upgrade(catalogue.engine)
    finally:
        catalogue.close()


def parse_url(url: str) -> URL:
    """The URL with the driver we use, or a UserError that says what is expected."""
    expected = "use sqlite:///path/to/file.db or postgresql://user@host/name"
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UserError(f"The catalogue URL cannot be read: {expected}.") from None
    name = parsed.drivername
    if name == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise UserError(
                f"The catalogue must be a file, so that several processes can share it: {expected}."
            )
        return parsed
    if name in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    raise UserError(f"The catalogue cannot be kept in {name!r}: {expected}.")


def _sqlite_engine(url: URL) -> Engine:
    sqlite.make_parent(url.database or "")
    engine = create_engine(
        url,
        module=sqlite.driver(),
        connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
        pool_size=8,
        max_overflow=56,  # waiting for a connection helps nobody: a reader of a file costs little
    )
    event.listen(engine, "connect", sqlite.prepare)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _begin_sqlite(connection: Connection) -> None:
    """The driver begins nothing by itself (`isolation_level` None), so that reads are transactions too."""
    writes = connection.get_execution_options().get("sqlite_begin", "write") == "write"
    connection.exec_driver_sql(f"PRAGMA query_only = {'OFF' if writes else 'ON'}")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _postgresql_engine(url: URL) -> Engine:
    try:
        return create_engine(
            url,
            pool_pre_ping=True,
            pool_size=10,
            max_overflow=20,
            pool_timeout=BUSY_SECONDS,
            connect_args={"connect_timeout": 10},
        )
    except (NoSuchModuleError, ModuleNotFoundError):
        raise UserError("PostgreSQL needs its driver: pip install 'psycopg[binary]'.") from None


@contextmanager
def _errors_named() -> Iterator[None]:
    """Give the database's retryable troubles their names in our tree; let mistakes in our SQL through."""
    try:
        yield
    except StaleDataError as error:  # another transaction has deleted what this one was to change
        raise Overloaded("The catalogue is busy with another write; try again.") from error
    except DBAPIError as error:
        if sqlite.is_busy(error.orig) or getattr(error.orig, "sqlstate", None) in _OVERTAKEN:
            raise Overloaded("The catalogue is busy with another write; try again.") from error
        if error.connection_invalidated or _cannot_connect(error.orig):
            raise StorageUnavailable("The catalogue's database does not answer.") from error
        if sqlite.is_full(error.orig) or getattr(error.orig, "sqlstate", None) == _DISK_FULL:
            raise StorageUnavailable("The catalogue's disk is full.") from error
        if "NUL (0x00)" in str(error.orig):  # PostgreSQL holds no such text
            raise UserError("A name or text with a NUL character cannot be stored.") from None
        raise


def _cannot_connect(error: Any) -> bool:
    if type(error).__module__.startswith("psycopg"):
        # Without a code from the server, no server spoke.
        return type(error).__name__ in ("OperationalError", "ConnectionTimeout") and not error.sqlstate
    return getattr(error, "sqlite_errorname", "") == "SQLITE_CANTOPEN"
