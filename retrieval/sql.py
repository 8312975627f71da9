"""Plain SQL in a session."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session


def run(session: Session, sql: str, values: Any = None) -> Any:
    """Execute SQL with `:name` for a value; a list of values: once for each."""
    values = values if values is not None else {}
    connection = session.connection()
    if connection.dialect.name == "sqlite":  # whose driver reads such SQL itself: less than half of the work for each statement
        return connection.exec_driver_sql(sql, values)
    return session.execute(text(sql), values)
