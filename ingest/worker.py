"""The ingest worker's loop: claim a file, bring it to its end, and look again.

While files are computed the next is claimed, fetched and parsed in a thread beside: one ahead, no more. Files that have been
cut wait in hand for their vectors, a few small ones together, and are committed in the order they were taken. Jobs are
planned in another thread, so that nobody's file waits while another tenant's source is listed and read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from ingest.jobs import lock_job, settle
from ingest.leases import FileLease, LeaseLost, claim_file
from ingest.plans import claim_plan, fail_plan, give_back_plan, hand_over_plan, renew_plan
from ingest.run import FileRun
from storage.catalogue.engine import Catalogue
from storage.catalogue.lease import Heartbeat
from storage.catalogue.schema import Job
from storage.errors import FILE_ERROR_CODES, Cancelled, Overloaded, PrereadError, Stopping, StorageUnavailable

log = structlog.get_logger()
LOOK_SECONDS = 0.5  # how often an idle worker looks for files while it plans
IN_HAND = 8  # files that wait for their vectors, at most
TEXT_IN_HAND = 1 << 20  # characters of them; one file may have more, by itself
WAIT_SECONDS = 0.2  # how often files in hand are asked whether they are still wanted
PLAN_DELAY = 5.0  # seconds until a plan is tried again whose store did not answer


class Process(Protocol):
    def begin(self, lease: FileLease) -> FileRun:
        """Do the first half of a file's run: what needs no model."""
        ...


class Planner(Protocol):
    def plan(self, job: Job) -> None:
        """Find out the files of a leased sync job, and store them with it."""
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
    _last_tenant: str | None = None
    _planner: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="plan"))
    _planning: Future[bool] | None = None
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="ahead"))

    def drain(self, stop: Callable[[], bool] = lambda: False, seconds: float | None = None) -> int:
        """Work until nothing is due, `stop()` says so, or the time is up; the number of files that were
        worked on."""
        until = None if seconds is None else time.monotonic() + seconds

        def more() -> bool:
            return not stop() and (until is None or time.monotonic() < until)

        files = 0
        hand: deque[FileRun] = deque()
        ahead: _Ahead | None = None
        try:
            while ahead is not None or hand or more():
                if hand and not _is_read(ahead, hand):
                    files += self._end_oldest(hand)
                    continue
                if self._planning is None or self._planning.done():
                    self._planning = self._planner.submit(self._plan_one)
                run, looked, ahead = (ahead.take() if ahead else self._begin_one()), ahead is None, None
                if run is None and looked and not self._has_planned(self._planning):
                    break
                if run is None:
                    while hand:  # what has been finished meanwhile may have brought more: an archive's files
                        files += self._end_oldest(hand)
                    continue
                if not run.alone and more():
                    ahead = _Ahead(self._reader, lambda: self._begin_one(ahead=True))
                run.go_on()
                hand.append(run)
                while hand and (run.ended or len(hand) >= IN_HAND or sum(each.size for each in hand) > TEXT_IN_HAND):
                    files += self._end_oldest(hand)
        finally:
            for each in (ahead, *hand):
                if each is not None:
                    each.leave()
        return files

    def _end_oldest(self, hand: deque[FileRun]) -> int:
        """Bring the file that was taken first to its end; the number of files that were worked on."""
        while (ready := hand[0].waits_for) is not None:
            wait((ready,), WAIT_SECONDS)
            _look(hand)
        hand.popleft().finish()
        self.ring("precompute")
        return 1

    def _has_planned(self, planning: Future[bool]) -> bool:
        """Whether to look for files again: a job was planned, or one still is."""
        try:
            return planning.result(LOOK_SECONDS)
        except TimeoutError:
            return True

    def _begin_one(self, *, ahead: bool = False) -> FileRun | None:
        lease = claim_file(self.catalogue, self.owner, self.lease_seconds, last_tenant=self._last_tenant, ahead=ahead)
        if lease is None:
            return None
        self._last_tenant = lease.tenant_id
        return self.pipeline.begin(lease)

    def _plan_one(self) -> bool:
        if self.planner is None:
            return False
        job = claim_plan(self.catalogue, self.owner, self.lease_seconds)
        if job is None:
            return False
        try:
            with Heartbeat(
                lambda: renew_plan(self.catalogue, job, self.lease_seconds), self.lease_seconds / 3
            ):
                self.planner.plan(job)
        except LeaseLost:
            log.info("lease_lost", job=job.id)
        except Stopping:
            self._end_plan(job, hand_over_plan)
        except Cancelled:
            self._end_plan(job, lambda row: None)
        except (StorageUnavailable, Overloaded):
            message = "the store did not answer"
            self._end_plan(job, lambda row: give_back_plan(row, "storage_error", message, PLAN_DELAY))
        except PrereadError as error:
            code = error.code if error.code in FILE_ERROR_CODES else "storage_error"
            message = str(error)
            self._end_plan(job, lambda row: fail_plan(row, code, message))
        except Exception as error:  # noqa: BLE001 - a fault of ours in one job must not stop the others
            log.error("plan_fault", job=job.id, error=type(error).__name__)
            message = f"the worker failed with {type(error).__name__}"
            self._end_plan(job, lambda row: give_back_plan(row, "worker_lost", message))
        return True

    def _end_plan(self, job: Job, end: Callable[[Job], None]) -> None:
        with self.catalogue.write() as session:
            row = lock_job(session, job.id)
            if row is None or row.lease_owner != job.lease_owner:
                return
            row.lease_owner = row.lease_expires = None
            end(row)
            settle(session, row.id)


def _look(hand: deque[FileRun]) -> None:
    for run in hand:
        run.look()


def _is_read(ahead: _Ahead | None, hand: deque[FileRun]) -> bool:
    """Wait until the next file has been read (True), or the oldest in hand need not wait any more, or there is no next."""
    while ahead is not None and not ahead.is_read.done():
        if (ready := hand[0].waits_for) is None:
            return False
        wait((ready, ahead.is_read), WAIT_SECONDS, FIRST_COMPLETED)
        _look(hand)
    return ahead is not None


class _Ahead:
    """The next file, begun in a thread while those before it are finished."""

    def __init__(self, thread: ThreadPoolExecutor, begin: Callable[[], FileRun | None]) -> None:
        self.is_read: Future[None] = Future()  # or there is none
        self._wanted = threading.Event()
        self._run = thread.submit(self._until_wanted, begin)

    def _until_wanted(self, begin: Callable[[], FileRun | None]) -> FileRun | None:
        try:
            run = begin()
        finally:
            self.is_read.set_result(None)
        if run is not None:
            run.wait(self._wanted)
        return run

    def take(self) -> FileRun | None:
        """The run, whose turn it is; None if no file is due."""
        self._wanted.set()
        return self._run.result()

    def leave(self) -> None:
        """Give the file up: this worker has broken down."""
        with contextlib.suppress(Exception):
            if (run := self.take()) is not None:
                run.leave()
