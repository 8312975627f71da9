"""The KV queue's Celery task: a bell is answered by computing what is owed. Safe to run twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from celery import Celery

    from precompute.queue import KVQueue

PRECOMPUTE = "preread.precompute"
TURN_SECONDS = 20.0  # after which a task ends and rings again, so that no message is held for long


class PrecomputeParts(Protocol):
    @property
    def kv_queue(self) -> KVQueue: ...

    @property
    def ring(self) -> Callable[[str], None]: ...


def register(app: Celery, parts: Callable[[], PrecomputeParts]) -> None:
    """Add the task to an app. `parts` is called in the process that works, at its first task."""

    def precompute() -> None:
        held = parts()
        if held.kv_queue.drain(seconds=TURN_SECONDS):
            held.ring("precompute")

    app.task(precompute, name=PRECOMPUTE, shared=False, ignore_result=True)
