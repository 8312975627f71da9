"""uvicorn, ended gracefully: while what has begun is finished, it goes on listening, and refuses what is new.

uvicorn's own way is to listen no more at once: then nobody learns from readyz that the process is to end, and a client gets
a broken connection where it could have had a 503 with `retry-after`.
"""

from __future__ import annotations

import contextlib
import os
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from serving.api.drain import Drain

log = structlog.get_logger(__name__)


class Server(uvicorn.Server):
    """Ends when `drain` says so after a first signal, and at once at a second one."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain
        self._said = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain.begun:
            os._exit(128 + sig)
        self._captured_signals.append(sig)  # raised again by uvicorn when all is done
        self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        if self._drain.begun and not self._said:
            self._said = True
            log.info("stopping", requests=self._drain.running)
        return await super().on_tick(counter) or self._drain.over()


def run_until_told(app: FastAPI, **options: Any) -> None:
    """Serve until SIGTERM or SIGINT, then for as long as `serving.api.drain` allows. `options`: uvicorn's."""
    with contextlib.suppress(KeyboardInterrupt):
        Server(uvicorn.Config(app, **options), app.state.drain).run()
