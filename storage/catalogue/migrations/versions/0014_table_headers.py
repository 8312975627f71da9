"""The header of the table inside which a chunk begins. Chunks that are there have none until their document is read again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("chunk", "version_chunk"):
        op.add_column(table, sa.Column("header", sa.Text(), nullable=False, server_default=""))
