"""Keys that expire, are limited, and carry names for access lists; tenants that can be disabled; sharing groups; the audit
log's chain, and triggers that keep it; logins."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

ADDED: dict[str, tuple[tuple[str, Any], ...]] = {
    "tenant": (("tokens_per_day", sa.BigInteger()), ("disabled_at", sa.Double())),
    "api_key": (
        ("expires_at", sa.Double()),
        ("principals", sa.JSON(none_as_null=True)),
        ("user_id", sa.String(length=255)),
        ("requests_per_minute", sa.Integer()),
        ("tokens_per_minute", sa.Integer()),
    ),
    "audit_event": (
        ("user_id", sa.String(length=255)),
        ("request_id", sa.String(length=64)),
        ("seq", sa.BigInteger()),
        ("mac", sa.String(length=64)),
    ),
}
KEPT = "an audit event is never changed, and deleted only when an operator has put it out of date"
# Rows up to `pruned_seq` are out of date; those from before the chain go with the first pruning.
OUTDATED = "(SELECT pruned_seq FROM audit_head WHERE audit_head.tenant_id = OLD.tenant_id)"
MAY_GO = f"COALESCE(OLD.seq, 1) <= COALESCE({OUTDATED}, 0)"
SQLITE = (
    f"CREATE TRIGGER audit_event_kept BEFORE UPDATE ON audit_event BEGIN SELECT RAISE(ABORT, '{KEPT}'); END",
    f"CREATE TRIGGER audit_event_stays BEFORE DELETE ON audit_event WHEN NOT ({MAY_GO}) "
    f"BEGIN SELECT RAISE(ABORT, '{KEPT}'); END",
)
POSTGRESQL = (
    f"CREATE FUNCTION audit_event_keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{KEPT}'; END $$",
    f"CREATE FUNCTION audit_event_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF {MAY_GO} THEN RETURN OLD; END IF; "
    f"RAISE EXCEPTION '{KEPT}'; END $$",
    "CREATE TRIGGER audit_event_kept BEFORE UPDATE ON audit_event FOR EACH ROW EXECUTE FUNCTION audit_event_keep()",
    "CREATE TRIGGER audit_event_whole BEFORE TRUNCATE ON audit_event EXECUTE FUNCTION audit_event_keep()",
    "CREATE TRIGGER audit_event_stays BEFORE DELETE ON audit_event FOR EACH ROW EXECUTE FUNCTION audit_event_stay()",
)


def upgrade() -> None:
    for table, columns in ADDED.items():
        for name, kind in columns:
            op.add_column(table, sa.Column(name, kind, nullable=True))
    op.add_column("audit_event", sa.Column("outcome", sa.String(length=16), nullable=False, server_default="ok"))
    op.create_index("audit_chain", "audit_event", ["tenant_id", "seq"], unique=True)
    op.create_table(
        "audit_head",
        sa.Column("tenant_id", sa.String(length=64), primary_key=True),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("mac", sa.String(length=64), nullable=False),
        sa.Column("pruned_seq", sa.BigInteger(), nullable=False),
        sa.Column("pruned_mac", sa.String(length=64), nullable=False),
    )
    op.create_table(
        "sharing_group",
        sa.Column("name", sa.String(length=48), primary_key=True),
        sa.Column("tenants", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "login_state",
        sa.Column("digest", sa.String(length=64), primary_key=True),
        sa.Column("expires_at", sa.Double(), nullable=False),
    )
    for statement in SQLITE if op.get_bind().dialect.name == "sqlite" else POSTGRESQL:
        op.execute(statement)
