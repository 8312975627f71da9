"""One piece of work in several threads, of which there are only so many."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def spread(act: Callable[[T], R], items: Sequence[T], helpers: threading.BoundedSemaphore, limit: int) -> list[R]:
    """`act` of every item, by the caller and up to `limit` - 1 more threads, as many as `helpers` has free.

    Returns when no thread is at it any more, so that nobody writes into the caller's memory later. After an error
    nothing more is begun; the first is raised."""
    todo = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors and (taken := _pop(todo)):
                results[taken[0]] = act(taken[1])
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)

    def help_out() -> None:
        try:
            work()
        finally:
            helpers.release()

    threads: list[threading.Thread] = []
    while len(threads) < min(limit, len(items)) - 1 and helpers.acquire(blocking=False):
        # The caller's context, for its deadline. Daemons: a stalled store must not hold the process at its end.
        target = contextvars.copy_context().run
        threads.append(threading.Thread(target=target, args=(help_out,), name="object-reader", daemon=True))
        threads[-1].start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


def _pop(todo: deque[T]) -> T | None:
    try:
        return todo.popleft()
    except IndexError:
        return None
