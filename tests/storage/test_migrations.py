"""From every revision there has been: a catalogue with a row in each table becomes today's, and no row is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from storage.anchors import SHORTEST, anchors_of
from storage.catalogue.engine import Catalogue, migrate, open_catalogue
from storage.catalogue.migrate import alembic_config
from storage.catalogue.schema import Base, ChunkRow
from storage.keys import token_bytes

REVISIONS = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]
OURS = {table.name for table in Base.metadata.sorted_tables}


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/c.db" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


def at_revision(catalogue: Catalogue, revision: str) -> None:
    config = alembic_config()
    with catalogue.engine.begin() as connection:
        if catalogue.dialect == "postgresql":
            connection.execute(sa.text("CREATE EXTENSION IF NOT EXISTS vector"))
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def filled(catalogue: Catalogue) -> dict[str, dict[str, Any]]:
    """One row in each table as it is now, by table; foreign keys lead to the row in the table they name."""
    tables, rows = sa.MetaData(), {}
    tables.reflect(catalogue.engine, only=lambda name, _: name in OURS)
    with catalogue.engine.begin() as connection:
        for table in tables.sorted_tables:
            row = {column.name: _value(column, rows) for column in table.columns}
            connection.execute(table.insert(), row)
            rows[table.name] = row
    return rows


def _value(column: Any, rows: dict[str, dict[str, Any]]) -> Any:
    for key in column.foreign_keys:
        return rows[key.column.table.name][key.column.name] if key.column.table.name in rows else None
    kind = column.type
    if isinstance(kind, sa.JSON):
        return {"kept": [1, "ü"]} if column.name not in ("access", "headings") else ["kept"]
    if isinstance(kind, sa.Boolean):
        return True
    if isinstance(kind, sa.Integer):
        return 7
    if isinstance(kind, sa.Float):
        return 7.5
    if isinstance(kind, sa.LargeBinary):
        return b"\x00kept\xff\x00\x01"  # whole token ids
    return f"{column.table.name}.{column.name}"[: kind.length or 99]


def read(catalogue: Catalogue) -> Iterator[tuple[str, dict[str, Any]]]:
    with catalogue.read() as session:
        for table in Base.metadata.sorted_tables:
            for row in session.execute(sa.select(table)):
                yield table.name, dict(row._mapping)


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_catalogue_of_that_revision_becomes_todays_and_keeps_its_rows(url: str, revision: str) -> None:
    catalogue = open_catalogue(url)
    at_revision(catalogue, revision)
    before = filled(catalogue)
    catalogue.close()
    migrate(url)
    after = dict(read(catalogue))
    assert set(before) <= set(after)
    for name, row in before.items():
        assert row.items() <= after[name].items(), name
    with catalogue.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), Base.metadata) == []
    catalogue.close()


@pytest.mark.parametrize("missing", [0, 1])
def test_chunks_of_before_get_their_anchors_if_they_are_long_enough(url: str, missing: int) -> None:
    catalogue, ids = open_catalogue(url), list(range(100, 100 + SHORTEST - missing))
    at_revision(catalogue, "0008")
    filled(catalogue)
    with catalogue.engine.begin() as connection:
        connection.execute(sa.text("UPDATE chunk SET token_ids = :ids"), {"ids": token_bytes(ids)})
    catalogue.close()
    migrate(url)
    with catalogue.read() as session:
        [found] = session.execute(sa.select(ChunkRow.head, ChunkRow.tail)).all()
    catalogue.close()
    assert tuple(found) == ((None, None) if missing else anchors_of(ids))


def test_no_revision_leads_back() -> None:
    scripts = ScriptDirectory.from_config(alembic_config()).walk_revisions()
    assert not [script.revision for script in scripts if hasattr(script.module, "downgrade")]


def test_revisions_are_walked_from_the_first() -> None:
    assert REVISIONS[0].startswith("0001")
    assert len(REVISIONS) == len(set(REVISIONS))


def test_blocks_of_signs_get_stamps_and_keep_their_bytes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/c.db"
    catalogue = open_catalogue(url)
    at_revision(catalogue, "0011")
    blocks = [("vs_1", block, 2, bytes([block]) * 16, bytes([block]) * 9000) for block in range(3)]
    with catalogue.engine.begin() as connection:
        for name in ("index_signs_a", "index_signs_b"):
            columns = "corpus_id TEXT, block INTEGER, chunks INTEGER, ids BLOB, signs BLOB, PRIMARY KEY (corpus_id, block)"
            connection.exec_driver_sql(f"CREATE TABLE {name} ({columns})")
            connection.exec_driver_sql(f"INSERT INTO {name} VALUES (?, ?, ?, ?, ?)", blocks)
    migrate(url)
    with catalogue.engine.begin() as connection:
        stamps = []
        for name in ("index_signs_a", "index_signs_b"):
            rows = connection.exec_driver_sql(f"SELECT corpus_id, block, chunks, ids, signs FROM {name} ORDER BY block").all()
            assert list(map(tuple, rows)) == blocks
            stamps += connection.exec_driver_sql(f"SELECT stamp FROM {name}").scalars().all()
        assert len(set(stamps)) == 6
        assert None not in stamps
        with pytest.raises(sa.exc.IntegrityError):  # and a block is there once, as before
            connection.exec_driver_sql("INSERT INTO index_signs_a (corpus_id, block) VALUES ('vs_1', 0)")
    catalogue.close()
