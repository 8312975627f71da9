"""Leases: who works on a row and until when. A worker holds a row by its token; an expired lease is
anybody's."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from sqlalchemy.exc import SQLAlchemyError

from storage.errors import PrereadError


def lease_token(owner: str) -> str:
    """A token of one claim by `owner`: a worker that claims a row twice holds two different leases."""
    return f"{owner[:40]}:{secrets.token_hex(8)}"


def rotate(tenants: Sequence[str], last: str | None) -> str | None:
    """The tenant whose turn comes after `last`, so that one tenant's long queue does not hold up
    another's."""
    ordered = sorted(tenants)
    return next((t for t in ordered if last is None or t > last), ordered[0] if ordered else None)


class Heartbeat:
    """Calls `beat` every `seconds` in a thread while its block runs. A beat the database refused is tried
    again."""

    def __init__(self, beat: Callable[[], None], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._beat()
            except (PrereadError, SQLAlchemyError):
                continue  # the lease outlives several beats
