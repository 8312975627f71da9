"""Alembic's entry. The connection, already in a transaction, is handed in by `storage.catalogue.migrate`."""

from __future__ import annotations

from alembic import context

from storage.catalogue.schema import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
