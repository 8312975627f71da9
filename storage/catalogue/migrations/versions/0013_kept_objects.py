"""What a child site keeps of its parent's objects, so that it can be kept within a budget."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kept_object",
        sa.Column("key", sa.String(64), sa.ForeignKey("kv_object.key", ondelete="CASCADE"), primary_key=True),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("uses", sa.BigInteger, nullable=False),
        sa.Column("value", sa.Double, nullable=False),
    )
    op.add_column("site_link", sa.Column("kept_floor", sa.Double, nullable=False, server_default="0"))
    op.create_index("kept_value", "kept_object", ["value"])
