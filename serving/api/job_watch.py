"""Jobs that somebody watches: one look at the catalogue for all, however many streams show them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from anyio import move_on_after, to_thread

from ingest.job_view import job_events
from serving.api.errors import log_failure
from serving.doors.jobs import ENDED
from storage.catalogue.engine import Catalogue

LOOK_SECONDS = 0.3
SHARE = 0.2  # of the time at most is spent looking, also when very many jobs are watched


@dataclass(frozen=True)
class News:
    """A job as it was when looked at. `number`: its event's id, which grows; `frame`: the event as it is sent."""

    number: int
    frame: str
    ended: bool


Asked = tuple[str, frozenset[str]]  # a job, and by which names documents' lists know who looks
GONE = News(-1, "", True)
STOPPED = News(-1, ": the server is being stopped\n\n", True)  # the client comes back, to this process or another


@dataclass
class Watched:
    """A job that streams show."""

    streams: int = 0
    news: News | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def after(self, number: int, seconds: float) -> News | None:
        """What is newer than event `number`, or says that nothing will be; None if nothing came for so long."""
        with move_on_after(seconds):
            while self.news is None or not (self.news.ended or self.news.number > number):
                await self.changed.wait()
            return self.news
        return None

    def tell(self, news: News) -> None:
        self.news = news
        self.changed.set()
        self.changed = asyncio.Event()


class JobWatch:
    """Used by the event loop's thread. It looks only while somebody watches. `stopping`: whether the process is to end."""

    def __init__(self, catalogue: Catalogue, stopping: Callable[[], bool] = lambda: False) -> None:
        self._catalogue, self._stopping = catalogue, stopping
        self._jobs: dict[Asked, Watched] = {}
        self._looking: asyncio.Task[None] | None = None
        self._new = asyncio.Event()

    @contextmanager
    def watching(self, asked: Asked) -> Iterator[Watched]:
        job = self._jobs.setdefault(asked, Watched())
        job.streams += 1
        self._new.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            yield job
        finally:
            job.streams -= 1
            if not job.streams:
                del self._jobs[asked]

    async def _look(self) -> None:
        while self._jobs:
            self._new.clear()
            begun = time.monotonic()
            if self._stopping():
                self._tell(dict.fromkeys(self._jobs, STOPPED))
                return
            try:
                self._tell(await to_thread.run_sync(self._read, list(self._jobs)))
            except Exception as error:  # noqa: BLE001 - the streams go on when the catalogue does
                log_failure(error)
            took = time.monotonic() - begun
            if took < LOOK_SECONDS:  # a new stream is shown its job at once
                with move_on_after(LOOK_SECONDS):
                    await self._new.wait()
            await asyncio.sleep(took * (1 / SHARE - 1))

    def _read(self, watched: list[Asked]) -> dict[Asked, News]:
        found = job_events(self._catalogue, watched)
        return {asked: _news(*found[asked]) if asked in found else GONE for asked in watched}

    def _tell(self, found: dict[Asked, News]) -> None:
        for asked, news in found.items():
            job = self._jobs.get(asked)
            if job is not None and (job.news is None or news.ended or news.number > job.news.number):
                job.tell(news)


def _news(number: int, shown: dict[str, Any]) -> News:
    text = json.dumps(shown, ensure_ascii=False)
    return News(number, f"id: {number}\nevent: job\ndata: {text}\n\n", shown["status"] in ENDED)
