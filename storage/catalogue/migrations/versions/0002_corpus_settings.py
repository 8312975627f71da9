"""What an operator says of a corpus: `corpus.settings`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("corpus") as table:
        table.add_column(sa.Column("settings", sa.JSON(), nullable=False, server_default="{}"))
