"""A stamp for each block of signs, so that a process knows whether the block that it holds is still the one (SQLite)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

COLUMNS = "corpus_id TEXT, block INTEGER, chunks INTEGER, stamp INTEGER, ids BLOB, signs BLOB, PRIMARY KEY (corpus_id, block)"


def upgrade() -> None:
    for table in _tables():
        op.execute(f"ALTER TABLE {table} RENAME TO {table}_before")
        # The stamp stands before the blobs: behind them, reading it would walk through all of their pages.
        op.execute(f"CREATE TABLE {table} ({COLUMNS})")
        op.execute(f"INSERT INTO {table} SELECT corpus_id, block, chunks, random(), ids, signs FROM {table}_before")
        op.execute(f"DROP TABLE {table}_before")


def _tables() -> list[str]:
    """Every generation's. The index makes them, not a migration; PostgreSQL has none."""
    names = sa.inspect(op.get_bind()).get_table_names()
    return [name for name in names if name.startswith("index_signs_")]
