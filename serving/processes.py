"""The processes: the API's app, the worker under Celery, and the beat. Each builds its own parts."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from anyio import to_thread
from celery.platforms import SecurityWarning
from celery.signals import worker_shutting_down
from sqlalchemy.exc import SQLAlchemyError

from ingest import tasks as ingest_tasks
from precompute import tasks as precompute_tasks
from serving.celery_app import QUEUES
from serving.parts import Wiring
from serving.settings import Settings
from storage.errors import PrereadError, UserError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from serving.usage import Meter

log = structlog.get_logger(__name__)
FETCH_SECONDS = 10.0  # after which what is fetched ahead of its use is written down, and goes on at the next tick
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICK_GRACE = 2.0  # seconds that a tick has to finish when the beat is told to end
CONCURRENCY = 2  # one thread may ingest while the other computes KV


def build_api(settings: Settings, last: Callable[[], object] = lambda: None) -> FastAPI:
    """The app with its engine loaded and warm, so that the first question is not the slow one. `last` is called at its end."""
    from serving.api.app import build_app

    if settings.engine == "vllm":  # which has the tiers too
        wiring = Wiring(settings)
    else:
        wiring = Wiring(settings, memory_bytes=settings.memory_cache_bytes, disk_bytes=settings.disk_cache)
    app = build_app(wiring.api)
    if settings.engine == "torch" and not wiring.reader.full_prefill_reason:
        wiring.reader.frame_kv()
    wiring.embedder.embed(["warm"])
    threading.Thread(target=_keep_in_step, args=(wiring,), name="kv-forget", daemon=True).start()
    tasks: list[tuple[str, Callable[[], object]]] = [("usage", wiring.meter.tick), ("placement", wiring.placement.tick)]
    if wiring.parent is not None:
        tasks.append(("kept", wiring.parent.kept.flush))
    for name, task in tasks:
        arguments = (name, task, wiring.settings.tick_seconds)
        threading.Thread(target=_keep_doing, args=arguments, name=name, daemon=True).start()
    app.router.lifespan_context = partial(_until_the_end, wiring.meter, last)
    return app


def _keep_doing(name: str, task: Callable[[], object], seconds: float) -> None:
    while True:
        time.sleep(seconds)
        try:
            task()
        except Exception as error:  # noqa: BLE001 - a thread that has ended is missed by nobody
            log.warning("task failed", task=name, error=type(error).__name__)


@asynccontextmanager
async def _until_the_end(meter: Meter, last: Callable[[], object], app: FastAPI) -> AsyncIterator[None]:
    """A server that ends properly loses nothing of what it counted."""
    yield
    try:
        await to_thread.run_sync(meter.flush)
    except (PrereadError, SQLAlchemyError) as error:
        log.warning("usage lost", error=type(error).__name__)
    await to_thread.run_sync(last)


def _keep_in_step(wiring: Wiring) -> None:
    """Deletions by workers, other API processes and the parent site reach this one's memory within a tick."""
    while True:
        pause = wiring.settings.tick_seconds
        try:
            pause = wiring.stay_in_step()
        except (PrereadError, SQLAlchemyError) as error:
            log.warning("forgetting failed", error=type(error).__name__)
        time.sleep(pause)


def _end_at_once_next_time() -> None:
    """A second signal kills, as SIGKILL would: nothing is lost by it, but leases have to run out."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: os._exit(128 + number))


# --- the worker ---


class Drains(Protocol):
    def drain(self, stop: Callable[[], bool], seconds: float | None) -> int: ...


@dataclass
class Turns:
    """A queue's work as its task calls it: one thread at a time, and nothing new once the process is to end.

    A bell that finds the work going on already has nothing to add."""

    work: Drains
    stop: threading.Event
    ring: Callable[[str], None]

    def __post_init__(self) -> None:
        self._busy = threading.Lock()

    def drain(self, seconds: float) -> int:
        if not self._busy.acquire(blocking=False):
            return 0
        try:
            return self.work.drain(self.stop.is_set, seconds)
        finally:
            self._busy.release()


class WorkerParts:
    """What the tasks are handed."""

    def __init__(self, wiring: Wiring, stop: threading.Event) -> None:
        self._wiring, self._stop = wiring, stop
        self.ring = wiring.ring

    @cached_property
    def ingest_worker(self) -> Any:
        return Turns(self._wiring.ingest_worker, self._stop, self.ring)

    @cached_property
    def kv_queue(self) -> Any:
        return Turns(self._wiring.kv_queue, self._stop, self.ring)

    @property
    def ticker(self) -> Any:
        return self._wiring.ticker


def run_worker(settings: Settings, queues: Sequence[str]) -> None:
    """Work on these queues until told to stop; what is in work is handed over. Told again, it ends at once. Raises
    UserError."""
    unknown = [queue for queue in queues if queue not in QUEUES]
    if unknown or not queues:
        raise UserError(
            f"unknown queue {unknown[0]!r}: use {', '.join(QUEUES)}" if unknown else "name a queue"
        )
    wiring = Wiring(settings)
    stop = wiring.stopping
    parts = WorkerParts(wiring, stop)
    app = wiring.celery
    ingest_tasks.register(app, lambda: parts)
    precompute_tasks.register(app, lambda: parts)

    def on_stop(**_: object) -> None:
        stop.set()
        _end_at_once_next_time()

    worker_shutting_down.connect(on_stop, weak=False)
    # Celery warns of running as root because of pickle; only JSON is accepted here.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    try:
        for queue in queues:  # there may be work whose bell rang before anybody listened
            wiring.ring(queue)
        app.Worker(
            pool="threads",
            concurrency=CONCURRENCY,
            queues=list(queues),
            hostname=f"{wiring.owner}@preread",
            loglevel="WARNING",
            without_gossip=True,
            without_mingle=True,
            quiet=True,
        ).start()
    finally:
        worker_shutting_down.disconnect(on_stop)
        wiring.close()


# --- the beat ---


def run_beat(settings: Settings) -> None:
    """Tick until told to stop. It needs no worker: a hung one loses its leases all the same."""
    wiring, stop = Wiring(settings), threading.Event()

    def on_stop(*_: object) -> None:
        stop.set()
        _end_at_once_next_time()

    for number in STOP_SIGNALS:
        signal.signal(number, on_stop)
    if settings.parent_url:
        _follow_parent(wiring, stop)
    # A thread of its own: receivers that hang must not hold up the tick.
    arguments = (lambda: wiring.courier.tick(), "webhooks not sent", stop, settings.tick_seconds)
    threading.Thread(target=_repeat, args=arguments, name="webhooks", daemon=True).start()
    # And so has the tick: the process ends without waiting for it, since what a tick leaves undone the next one does.
    arguments = (lambda: wiring.ticker.tick(), "tick failed", stop, settings.tick_seconds)
    ticking = threading.Thread(target=_repeat, args=arguments, name="tick", daemon=True)
    ticking.start()
    try:
        stop.wait()
        ticking.join(TICK_GRACE)
    finally:
        wiring.close()


def _follow_parent(wiring: Wiring, stop: threading.Event) -> None:
    """Threads of their own: neither a slow tick nor the fetching of large objects may cost the site its lease."""
    sync = wiring.site_sync
    parent = wiring.parent
    trim = parent.kept.trim if parent is not None else lambda: None
    for act in (sync.step, lambda: sync.replicate(FETCH_SECONDS), trim):
        arguments = (act, "parent site not reached", stop, wiring.settings.tick_seconds)
        threading.Thread(target=_repeat, args=arguments, name="parent-site", daemon=True).start()


def _repeat(act: Callable[[], object], trouble: str, stop: threading.Event, seconds: float) -> None:
    while not stop.is_set():
        try:
            act()
        except Exception as error:  # noqa: BLE001 - schedules, leases and a site's being in step hang on the next time
            log.warning(trouble, error=type(error).__name__)
        stop.wait(seconds)
