"""Sources by network, hooks by which git hosts tell of pushes, and webhooks that tell of the ends of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "source_item",
        sa.Column("corpus_id", sa.String(64), primary_key=True),
        sa.Column("path", sa.Text(), primary_key=True),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("refusal", sa.Text(), nullable=False),
    )
    op.create_table(
        "push_hook",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("corpus_id", sa.String(64), nullable=False),
        sa.Column("again", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.UniqueConstraint("corpus_id"),
    )
    op.create_table(
        "push_delivery",
        sa.Column("hook_id", sa.String(64), primary_key=True),
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("delivery_id", sa.String(64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=True),
    )
    op.create_index("push_delivery_at", "push_delivery", ["at"])
    _webhooks()
    op.create_index("job_finished", "job", ["tenant_id", "finished_at"])


def _webhooks() -> None:
    op.create_table(
        "webhook",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("corpora", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("looked_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_webhook_tenant_id", "webhook", ["tenant_id"])
    op.create_table(
        "webhook_delivery",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("webhook_id", sa.String(64), sa.ForeignKey("webhook.id"), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.Column("answer", sa.String(200), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.UniqueConstraint("webhook_id", "job_id"),
    )
    op.create_index("webhook_due", "webhook_delivery", ["status", "next_at"])
