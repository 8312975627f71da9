"""Generations of the search index: each corpus names the one it is searched in. An index of before is dropped: it takes a
reindex."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

CLOSED = sa.text("access IS NOT NULL")
BEFORE = ("index_vector", "index_words", "index_chunk", "index_meta")


def upgrade() -> None:
    op.create_table(
        "index_generation",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("embedding", sa.Text(), nullable=False),
        sa.Column("words", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.add_column("corpus", sa.Column("index_generation", sa.String(length=16), nullable=True))
    op.create_index("document_closed", "document", ["corpus_id"], sqlite_where=CLOSED, postgresql_where=CLOSED)
    op.execute("UPDATE corpus SET index_generation = 'before' WHERE id IN (SELECT corpus_id FROM chunk)")
    for table in BEFORE:
        op.execute(f"DROP TABLE IF EXISTS {table}")
