"""Queues whose turns cost the same however long they are; the content that a job's file waits for is a column; kept
generations of documents."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("job_file", sa.Column("sha256", sa.String(length=64), nullable=True))
    op.create_index("ix_job_file_sha256", "job_file", ["sha256"])
    op.create_index("job_file_turn", "job_file", ["job_id", "status", "id", "lease_expires", "file_id", "action"])
    op.drop_index("ix_kv_object_job_id", "kv_object")
    op.create_index("kv_job", "kv_object", ["job_id", "status"])
    op.create_index("kv_turn", "kv_object", ["status", "tenant_id", "created_at"])
    _move_awaited()
    op.add_column("corpus", sa.Column("versions_from", sa.Double(), nullable=True))
    op.add_column("document", sa.Column("current_since", sa.Double(), nullable=True))
    op.execute("UPDATE document SET current_since = created_at WHERE generation > 0")
    _create_versions()


def _create_versions() -> None:
    op.create_table(
        "document_version",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("document_id", sa.String(length=64), nullable=False),
        sa.Column("corpus_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("file_id", sa.String(length=64), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("access", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("attributes", sa.JSON(), nullable=False),
        sa.Column("not_stored", sa.String(length=64), nullable=True),
        sa.Column("codec", sa.String(length=32), nullable=True),
        sa.Column("valid_from", sa.Double(), nullable=False),
        sa.Column("valid_to", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["corpus_id"], ["corpus.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("version_corpus", "document_version", ["corpus_id", "valid_to"])
    op.create_index("version_document", "document_version", ["document_id"])
    op.create_index("version_file", "document_version", ["file_id"])
    op.create_table(
        "version_chunk",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("version_id", sa.String(length=64), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("end", sa.Integer(), nullable=False),
        sa.Column("headings", sa.JSON(), nullable=False),
        sa.Column("page_start", sa.Integer(), nullable=True),
        sa.Column("page_end", sa.Integer(), nullable=True),
        sa.Column("line_start", sa.Integer(), nullable=False),
        sa.Column("line_end", sa.Integer(), nullable=False),
        sa.Column("kv_key", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["version_id"], ["document_version.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("version_chunk_order", "version_chunk", ["version_id", "ordinal"])
    op.create_index("ix_version_chunk_kv_key", "version_chunk", ["kv_key"])


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
