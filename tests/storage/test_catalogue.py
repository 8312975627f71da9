"""The catalogue on both databases: transactions, durability, migrations."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from storage.catalogue import sqlite
from storage.catalogue.engine import Catalogue, migrate, open_catalogue
from storage.catalogue.schema import Base, Corpus, Tenant
from storage.errors import Overloaded, PrereadError, StorageUnavailable, UserError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/new folder/catalogue.db"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def url(request: pytest.FixtureRequest) -> str:
    name = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    return str(request.getfixturevalue(name))


@pytest.fixture
def catalogue(url: str):
    migrate(url)
    catalogue = open_catalogue(url)
    yield catalogue
    catalogue.close()


def tenant(name: str) -> Tenant:
    return Tenant(id=name, name=name, created_at=1.5)


def names(catalogue: Catalogue) -> list[str]:
    with catalogue.read() as session:
        return list(session.scalars(select(Tenant.id).order_by(Tenant.id)))


def test_a_write_that_ends_is_kept_and_one_that_raises_is_not(catalogue: Catalogue) -> None:
    with catalogue.write() as session:
        session.add(tenant("kept"))
    with contextlib.suppress(ZeroDivisionError), catalogue.write() as session:
        session.add(tenant("lost"))
        session.flush()
        raise ZeroDivisionError
    assert names(catalogue) == ["kept"]


def test_nothing_written_in_a_read_is_kept(catalogue: Catalogue) -> None:
    with catalogue.read() as session:
        session.add(tenant("sneaked"))
        with pytest.raises(DBAPIError):
            session.commit()
    assert names(catalogue) == []
    with catalogue.write() as session:  # and the connection can still write
        session.add(tenant("written"))
    assert names(catalogue) == ["written"]


def test_a_read_is_one_snapshot(catalogue: Catalogue) -> None:
    with catalogue.read() as session:
        assert list(session.scalars(select(Tenant.id))) == []
        with catalogue.write() as other:
            other.add(tenant("later"))
        assert list(session.scalars(select(Tenant.id))) == []
    assert names(catalogue) == ["later"]


def test_foreign_keys_are_enforced(catalogue: Catalogue) -> None:
    with pytest.raises((IntegrityError, Overloaded)), catalogue.write() as session:
        session.execute(
            text(
                "INSERT INTO file (id, tenant_id, filename, bytes, sha256, purpose, created_at)"
                " VALUES ('f', 'nobody', 'f', 0, '', '', 0)"
            )
        )


def test_rows_can_be_read_after_the_session(catalogue: Catalogue) -> None:
    with catalogue.write() as session:
        row = tenant("t")
        session.add(row)
    assert row.created_at == 1.5


def test_threads_that_read_and_then_write_all_get_through(catalogue: Catalogue) -> None:
    with catalogue.write() as session:
        session.add(tenant("0"))
    errors: list[Exception] = []

    def count_up() -> None:
        try:
            for _ in range(5):
                with catalogue.write() as session:
                    row = session.get_one(Tenant, "0", with_for_update=True)
                    row.name = f"{int(row.name) + 1}"
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=count_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with catalogue.read() as session:
        assert (errors, session.get_one(Tenant, "0").name) == ([], "40")


def test_migrated_tables_equal_the_schema(catalogue: Catalogue) -> None:
    with catalogue.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_migrating_again_changes_nothing_and_is_quick(catalogue: Catalogue, url: str) -> None:
    with catalogue.write() as session:
        session.add(tenant("kept"))
    started = time.monotonic()
    migrate(url)
    assert time.monotonic() - started < 2
    assert names(catalogue) == ["kept"]


def _migrate(url: str, results: object) -> None:
    try:
        migrate(url)
        results.put("done")  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001
        results.put(repr(error))  # type: ignore[attr-defined]


def test_processes_that_start_together_migrate_once(url: str) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["storage.catalogue.migrate", "storage.catalogue.schema"])
    results = context.Queue()
    processes = [context.Process(target=_migrate, args=(url, results)) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    results.close()
    assert outcomes == ["done"] * 4


def test_a_failed_migration_leaves_nothing(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import op

    create, made = op.create_table, []

    def fail_late(name: str, *columns: object, **options: object) -> object:
        made.append(name)
        if len(made) == 5:
            raise RuntimeError("disk full")
        return create(name, *columns, **options)

    monkeypatch.setattr(op, "create_table", fail_late)
    with pytest.raises(RuntimeError):
        migrate(sqlite_url)
    monkeypatch.undo()
    migrate(sqlite_url)


def test_a_child_process_does_not_use_its_parents_connections(catalogue: Catalogue) -> None:
    with catalogue.write() as session:
        session.add(tenant("t"))
    parents = catalogue.engine.pool
    catalogue._pid = -1  # what a fork looks like to the child
    assert names(catalogue) == ["t"]
    assert catalogue.engine.pool is not parents
    parents.dispose()


KILLED = """
import sys
from storage.catalogue.engine import open_catalogue
from storage.catalogue.schema import Tenant
catalogue = open_catalogue(sys.argv[1])
for number in range(100_000):
    with catalogue.write() as session:
        session.add(Tenant(id=f"{number:06}", name="x" * 2000, created_at=0.0))
    print(number, flush=True)
"""


def test_kill_during_writes_loses_no_acknowledged_row(sqlite_url: str) -> None:
    migrate(sqlite_url)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, sqlite_url], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child, child.stdout as lines:
        acknowledged = 0
        for line in lines:
            acknowledged = int(line)
            if acknowledged == 60:
                os.kill(child.pid, signal.SIGKILL)
    catalogue = open_catalogue(sqlite_url)
    kept = names(catalogue)
    with catalogue.read() as session:
        assert session.scalar(text("PRAGMA integrity_check")) == "ok"
    catalogue.close()
    assert acknowledged >= 60
    assert kept[: acknowledged + 1] == [f"{number:06}" for number in range(acknowledged + 1)]


def test_sqlite_is_durable_and_loads_vectors(sqlite_url: str) -> None:
    migrate(sqlite_url)
    catalogue = open_catalogue(sqlite_url)
    with catalogue.read() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA synchronous")) == 2
        assert session.scalar(text("PRAGMA busy_timeout")) == 30_000
        assert session.scalar(text("SELECT vec_version()")).startswith("v")
    catalogue.close()


def test_a_busy_catalogue_says_so_and_can_be_retried(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(sqlite_url)
    monkeypatch.setattr("storage.catalogue.engine.BUSY_SECONDS", 0.1)
    first, second = open_catalogue(sqlite_url), open_catalogue(sqlite_url)
    with first.write():
        for other in (first, second):  # a thread of this process, and another process
            with pytest.raises(Overloaded) as refused, other.write():
                pass
            assert refused.value.retryable
    for each in (first, second):
        each.close()


@pytest.mark.parametrize("url", ["", "nonsense", "sqlite://", "sqlite:///:memory:", "mysql://host/name"])
def test_a_url_we_cannot_use_is_refused_with_what_to_do(url: str) -> None:
    with pytest.raises(UserError, match="sqlite:///path"):
        open_catalogue(url)


def test_a_python_without_extensions_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        Connection = object

    monkeypatch.setattr(sqlite.importlib, "import_module", lambda name: Module)
    with pytest.raises(UserError, match="pip install pysqlite3-binary"):
        sqlite.driver()


@pytest.mark.services
def test_text_that_postgresql_cannot_hold_is_the_caller_s_mistake(postgres_url: str) -> None:
    migrate(postgres_url)
    catalogue = open_catalogue(postgres_url)
    with pytest.raises(UserError, match="NUL"), catalogue.write() as session:
        session.add(tenant("a\0b"))
    catalogue.close()


@pytest.mark.services
def test_who_loses_a_deadlock_on_postgresql_may_try_again(postgres_url: str) -> None:
    migrate(postgres_url)
    catalogue = open_catalogue(postgres_url)
    with catalogue.write() as session:
        session.add_all([tenant("a"), tenant("b")])
    met, refused = threading.Barrier(2), []

    def write(names: tuple[str, str]) -> None:
        try:
            with catalogue.write() as session:
                session.get(Tenant, names[0], with_for_update=True)
                met.wait(20)
                session.get(Tenant, names[1], with_for_update=True)
        except PrereadError as error:
            refused.append(error)

    threads = [threading.Thread(target=write, args=(names,)) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    catalogue.close()
    assert [type(error) for error in refused] == [Overloaded]
    assert refused[0].retryable


@pytest.mark.services
def test_a_serialization_failure_on_postgresql_is_retryable(postgres_url: str) -> None:
    migrate(postgres_url)
    catalogue = open_catalogue(postgres_url)
    with catalogue.write() as session:
        session.add(tenant("a"))

    def overtaken() -> None:
        with catalogue.write() as session:
            session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            session.scalar(select(Tenant.name))
            with catalogue.write() as other:
                other.get_one(Tenant, "a").name = "first"
            session.execute(text("UPDATE tenant SET name = 'second'"))

    with pytest.raises(Overloaded):
        overtaken()
    catalogue.close()


def test_an_unreachable_postgresql_is_a_retryable_refusal() -> None:
    catalogue = open_catalogue("postgresql://nobody@127.0.0.1:9/none")
    with pytest.raises(StorageUnavailable) as refused:
        catalogue.ping()
    catalogue.close()
    assert isinstance(refused.value, PrereadError)
    assert refused.value.retryable


def test_ping_answers(catalogue: Catalogue) -> None:
    catalogue.ping()


def test_corpora_keep_their_json(catalogue: Catalogue) -> None:
    with catalogue.write() as session:
        session.add(tenant("t"))
        session.flush()
        session.add(
            Corpus(
                id="vs_1", tenant_id="t", name="n", sharing_group="t", source=None,
                attributes={"team": "blue", "n": 1.5, "on": True}, created_at=0.0, last_active_at=0.0,
            )
        )  # fmt: skip
    with catalogue.read() as session:
        corpus = session.get_one(Corpus, "vs_1")
        assert (corpus.source, corpus.attributes) == (None, {"team": "blue", "n": 1.5, "on": True})
