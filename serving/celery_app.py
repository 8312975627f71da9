"""The Celery app: how a process rings workers and how workers hear it.

Celery is the doorbell, the catalogue's rows are the queue: a message lost or delivered twice costs time only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from serving.settings import Settings

QUEUES = ("ingest", "precompute")
log = structlog.get_logger(__name__)

# A message that a dead worker held comes back after this long. Short is harmless: rows are leased, so a bell
# that rings twice finds nothing to do.
VISIBILITY_SECONDS = 30
REDIS_OPTIONS = {
    "visibility_timeout": VISIBILITY_SECONDS,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "socket_connect_timeout": 3,
    "socket_timeout": 30,
    "retry_on_timeout": True,
}


def broker_file(settings: Settings) -> Path:
    """Where the supervisor writes the URL of the broker it started."""
    return settings.data_dir / "broker.url"


def broker_url(settings: Settings) -> str:
    """The configured broker, else the local one that is running, else files under the data folder."""
    if settings.broker_url:
        return settings.broker_url
    try:
        return broker_file(settings).read_text(encoding="utf-8").strip() or "filesystem://"
    except FileNotFoundError:
        return "filesystem://"


def build_celery(settings: Settings) -> Celery:
    """An app bound to this process's settings; tasks are registered on it by the worker entry."""
    url = broker_url(settings)
    app = Celery("preread", broker=url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_default_queue=QUEUES[0],
        task_create_missing_queues=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_connection_timeout=3,
        broker_transport_options=_transport_options(url, settings),
        enable_utc=True,
    )
    return app


def _transport_options(url: str, settings: Settings) -> dict[str, Any]:
    if not url.startswith("filesystem:"):
        return dict(REDIS_OPTIONS) if url.startswith(("redis", "rediss", "valkey")) else {}
    folder = settings.data_dir.resolve() / "broker"
    for name in ("queue", "control"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    queue = str(folder / "queue")
    return {"data_folder_in": queue, "data_folder_out": queue, "control_folder": str(folder / "control")}


def check_broker(app: Celery) -> Callable[[], None]:
    """A probe that raises if the broker does not answer; safe from any thread."""

    def check() -> None:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)

    return check


def ringer(app: Celery, bells: dict[str, str]) -> Callable[[str], None]:
    """`ring(queue)` sends that queue's task. An absent broker is logged, never raised: the beat rings on."""

    def ring(queue: str) -> None:
        try:
            app.send_task(bells[queue], queue=queue, retry=False, ignore_result=True, expires=60)
        except (OperationalError, OSError) as error:
            log.warning("bell not heard", queue=queue, error=str(error))

    return ring
