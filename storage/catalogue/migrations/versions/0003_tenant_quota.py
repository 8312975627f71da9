"""How many bytes a tenant may store: `tenant.quota_bytes`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("tenant") as table:
        table.add_column(sa.Column("quota_bytes", sa.BigInteger(), nullable=True))
