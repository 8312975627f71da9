"""What reuse saved and what it cost, by day; which documents were used; documents whose KV a rule keeps out."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

COUNTS = ("answers", "tokens_prompt", "tokens_completion", "tokens_reused", "tokens_recomputed", "bytes_fetched")


def upgrade() -> None:
    op.create_table(
        "usage_day",
        sa.Column("day", sa.Integer(), primary_key=True),
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("corpus_id", sa.String(64), primary_key=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
        sa.Column("tokens_compiled", sa.BigInteger(), nullable=False),
        sa.Column("seconds_compiled", sa.Double(), nullable=False),
    )
    op.create_index("usage_tenant", "usage_day", ["tenant_id", "day"])
    op.create_table(
        "document_use",
        sa.Column("document_id", sa.String(64), primary_key=True),
        sa.Column("day", sa.Integer(), primary_key=True),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
    )
    op.create_index("document_use_day", "document_use", ["day"])
    with op.batch_alter_table("document") as table:
        table.add_column(sa.Column("not_stored", sa.String(64), nullable=True))
        table.add_column(sa.Column("codec", sa.String(32), nullable=True))
