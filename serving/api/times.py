"""Times as clients send them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BeforeValidator, FiniteFloat


def _epoch(value: object) -> object:
    """ISO 8601 (UTC unless it says otherwise) as seconds since the epoch; what is none is left to be refused."""
    if not isinstance(value, str):
        return value
    try:
        read = datetime.fromisoformat(value)
    except ValueError:
        return value
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


# Seconds since the epoch, or ISO 8601.
Moment = Annotated[FiniteFloat, BeforeValidator(_epoch)]
