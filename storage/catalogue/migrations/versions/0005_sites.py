"""Sites: who may hold which KV, what was deleted since, how far each site is, and a site's own side of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "site",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("corpora", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("groups", sa.JSON(), nullable=False),
        sa.Column("pushed", sa.JSON(), nullable=False),
        sa.Column("erased", sa.BigInteger(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_site_tenant_id", "site", ["tenant_id"])
    op.create_table(
        "site_wanted",
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"]),
        sa.PrimaryKeyConstraint("site_id", "key"),
    )
    op.create_table(
        "site_erasure",
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["site_id"], ["site.id"]),
        sa.PrimaryKeyConstraint("site_id", "seq"),
    )
    op.create_table(
        "tombstone",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=True),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("sharing_group", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("seq"),
    )
    op.create_table(
        "site_link",
        sa.Column("site_id", sa.String(length=64), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=True),
        sa.Column("newest", sa.BigInteger(), nullable=False),
        sa.Column("syncs", sa.BigInteger(), nullable=False),
        sa.Column("synced_at", sa.Double(), nullable=True),
        sa.Column("pull_after", sa.String(length=64), nullable=False),
        sa.Column("pulled_objects", sa.BigInteger(), nullable=False),
        sa.Column("pulled_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("site_id"),
    )
