"""Queues whose turns cost the same however long they are; the content that a job's file waits for is a column."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job_file", sa.Column("sha256", sa.String(length=64), nullable=True))
    op.create_index("ix_job_file_sha256", "job_file", ["sha256"])
    op.create_index("job_file_turn", "job_file", ["job_id", "status", "id", "lease_expires", "file_id"])
    op.drop_index("ix_kv_object_job_id", "kv_object")
    op.create_index("kv_job", "kv_object", ["job_id", "status"])
    op.create_index("kv_turn", "kv_object", ["status", "tenant_id", "created_at"])
    _move_awaited()


def _move_awaited() -> None:
    """Syncs under way keep what they wait for in their request, by path: it goes to their files."""
    connection = op.get_bind()
    job = sa.table("job", sa.column("id"), sa.column("status"), sa.column("request", sa.JSON()))
    file = sa.table("job_file", sa.column("job_id"), sa.column("path"), sa.column("sha256"))
    active = job.c.status.in_(("queued", "in_progress", "cancelling"))
    for job_id, request in connection.execute(sa.select(job.c.id, job.c.request).where(active)).all():
        for path, sha256 in request.get("waiting", {}).items():
            row = sa.update(file).where(file.c.job_id == job_id, file.c.path == path)
            connection.execute(row.values(sha256=sha256))


def downgrade() -> None:
    op.drop_index("kv_turn", "kv_object")
    op.drop_index("kv_job", "kv_object")
    op.create_index("ix_kv_object_job_id", "kv_object", ["job_id"])
    op.drop_index("job_file_turn", "job_file")
    op.drop_index("ix_job_file_sha256", "job_file")
    with op.batch_alter_table("job_file") as table:
        table.drop_column("sha256")
