"""The ingest worker's loop: claim a file, bring it to its end, and look again.

While files are computed the next is claimed, fetched and parsed in a thread beside: one ahead. Jobs are planned in threads
of their own. So nobody's file waits while another tenant's source is listed, archive unpacked or long text embedded (see
`hand.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from ingest.hand import Hand
from ingest.leases import FileLease, claim_file
from ingest.planning import Planner, Planning
from ingest.run import FileRun
from storage.catalogue.engine import Catalogue

LOOK_SECONDS = 0.5  # how often a worker that found nothing to claim looks again, while it has something to do
PLANS_SECONDS = 0.1  # how often a worker with files in hand looks for jobs to plan
WAIT_SECONDS = 0.2  # how often files in hand are asked whether they are still wanted


class Process(Protocol):
    def begin(self, lease: FileLease) -> FileRun:
        """Do the first half of a file's run: what needs no model."""
        ...


@dataclass
class IngestWorker:
    """Works on files of any tenant in turn. `ring` is called with "precompute" when KV may be owed."""

    catalogue: Catalogue
    pipeline: Process
    planner: Planner | None
    owner: str
    ring: Callable[[str], None]
    lease_seconds: float = 60.0
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _last_tenant: str | None = None
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="ahead"))

    @cached_property
    def _planning(self) -> Planning:
        return Planning(self.catalogue, self.planner, self.owner, self.lease_seconds)

    def drain(self, stop: Callable[[], bool] = lambda: False, seconds: float | None = None) -> int:
        """Work until nothing is due, `stop()` says so, or the time is up and nothing in hand takes long; the number of files
        that were worked on. None while another thread is at it: that one leaves the process's others to the KV."""
        if not self._turn.acquire(blocking=False):
            return 0
        try:
            until = None if seconds is None else time.monotonic() + seconds
            return self._drain(lambda slow: not stop() and (slow or until is None or time.monotonic() < until))
        finally:
            self._turn.release()

    def _drain(self, more: Callable[[bool], bool]) -> int:
        files, hand = 0, Hand()
        ahead: Future[FileRun | None] | None = None
        idle_until, plans_at, had_nothing = 0.0, 0.0, True
        try:
            while True:
                if ended := hand.go_on():
                    files, idle_until = files + ended, 0.0
                    self.ring("precompute")
                going_on = more(hand.is_slow)
                if going_on and (not hand or time.monotonic() >= plans_at):
                    plans_at = time.monotonic() + PLANS_SECONDS
                    self._planning.begin()
                if ahead is not None and ahead.done() and hand.has_room_for(run := ahead.result()):
                    ahead = None
                    if run is not None:
                        hand.take(run)
                        continue
                    idle_until = time.monotonic() + LOOK_SECONDS if hand else 0.0
                    if had_nothing and not self._planning.brings_files(LOOK_SECONDS):
                        return files
                if ahead is None and going_on and hand.may_have_another and time.monotonic() >= idle_until:
                    had_nothing = not hand  # else what is in hand may bring more, or be what another file has to wait for
                    ahead = self._reader.submit(self._begin_one, hand.busy, hand.is_shared, more)
                elif ahead is None and not hand and not going_on:
                    return files
                self._wait(hand, ahead)
        finally:
            hand.leave()
            if ahead is not None:
                with contextlib.suppress(Exception):
                    if (run := ahead.result()) is not None:
                        run.leave()

    def _wait(self, hand: Hand, ahead: Future[FileRun | None] | None) -> None:
        """Return once there is something to do, or after a while in which nothing was; see whether all is still wanted."""
        if (awaited := hand.waits_for) is not None:
            if ahead is not None and not ahead.done():
                awaited = [*awaited, ahead]
            wait(awaited, WAIT_SECONDS, FIRST_COMPLETED)
        hand.look()

    def _begin_one(self, busy: set[str], ahead: bool, more: Callable[[bool], bool]) -> FileRun | None:
        if not more(False):  # told to end since it was asked: it would claim what has just been handed over
            return None
        lease = claim_file(
            self.catalogue, self.owner, self.lease_seconds, last_tenant=self._last_tenant, busy=busy, ahead=ahead
        )
        if lease is None:
            return None
        self._last_tenant = lease.tenant_id
        return self.pipeline.begin(lease)
