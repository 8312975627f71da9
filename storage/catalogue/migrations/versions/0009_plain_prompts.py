"""Anchors of chunks, by which a prompt that holds their text finds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import sqlalchemy as sa
from alembic import op

from storage.anchors import anchors_of

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

BATCH = 1000
COLUMNS = ("head", "tail")


def upgrade() -> None:
    for name in COLUMNS:
        op.add_column("chunk", sa.Column(name, sa.BigInteger(), nullable=True))
    _fill(op.get_bind())
    for name in COLUMNS:
        op.create_index(f"chunk_{name}", "chunk", ["tenant_id", name])


def _fill(connection: sa.Connection) -> None:
    chunk = sa.table("chunk", *map(sa.column, ("id", "token_ids", *COLUMNS)))
    one = sa.update(chunk).where(chunk.c.id == sa.bindparam("of"))
    change = one.values(head=sa.bindparam("first"), tail=sa.bindparam("last"))
    for rows in _batches(connection, chunk):
        found = [(number, anchors_of(np.frombuffer(ids, dtype="<u4").tolist())) for number, ids in rows]
        changes = [{"of": number, "first": both[0], "last": both[1]} for number, both in found if both is not None]
        if changes:
            connection.execute(change, changes)


def _batches(connection: sa.Connection, chunk: Any) -> Iterator[list[Any]]:
    after = 0
    while True:
        query = sa.select(chunk.c.id, chunk.c.token_ids).where(chunk.c.id > after).order_by(chunk.c.id).limit(BATCH)
        rows = [(row.id, row.token_ids) for row in connection.execute(query)]
        if not rows:
            return
        yield rows
        after = rows[-1][0]
