"""The ingest side's Celery tasks: a message becomes a call. Safe to run twice, and lost without harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from celery import Celery

    from ingest.ticker import Ticker
    from ingest.worker import IngestWorker

INGEST = "preread.ingest"
TICK = "preread.tick"
TURN_SECONDS = 20.0  # after which a task ends and rings again, so that no message is held for long


class IngestParts(Protocol):
    @property
    def ingest_worker(self) -> IngestWorker: ...

    @property
    def ticker(self) -> Ticker: ...


def register(app: Celery, parts: Callable[[], IngestParts]) -> None:
    """Add the tasks to an app. `parts` is called in the process that works, at its first task."""

    def ingest() -> None:
        worker = parts().ingest_worker
        if worker.drain(seconds=TURN_SECONDS):
            worker.ring("ingest")

    def tick() -> None:
        parts().ticker.tick()

    options: dict[str, Any] = {"shared": False, "ignore_result": True}
    app.task(ingest, name=INGEST, **options)
    app.task(tick, name=TICK, **options)
