"""INSERT … ON CONFLICT, which SQLAlchemy has once for each database."""

from __future__ import annotations

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session


def insert_into(session: Session, table: type[Any]) -> Any:
    """An INSERT of the session's own database, which can be told what to do on a conflict."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    return dialect.insert(table)
