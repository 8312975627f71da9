"""One leased file's run, in parts: what needs no model (fetch, parse), what asks for vectors (cut), and the rest (commit).

Between them the file waits for its turn and its vectors, so that a worker may have several in hand. A run comes to its end
whatever happens, in a part or between two: only a lost lease leaves the file to whoever holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy.orm import Session
from structlog.contextvars import bound_contextvars

from ingest.encoding import storable
from ingest.jobs import lock_job, mark_cancelled, settle
from ingest.leases import FileLease, Hold, JobStatus, LeaseLost, fail, give_back, hand_over, owned
from storage import tracing
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Job, JobFile
from storage.errors import Cancelled, FileError, ObjectMissing, Overloaded, Stopping, StorageUnavailable, UserError

log = structlog.get_logger()
RETRY_DELAY = 2.0  # seconds until a file is tried again whose store did not answer; doubled each time
_LOOK_SECONDS = 0.2  # how often a file that waits asks whether it is still wanted


@dataclass(frozen=True)
class Rest:
    """What is left of a run. `do` does its next part, and gives what is left then. `undo` takes back what has been done for
    it, where it does not come to its end. `ready`: done once it need not wait; `size`: characters of text held for it;
    `slow`: it may take minutes, beside which other files are worked on."""

    do: Callable[[], Rest | None]
    undo: Callable[[], None] = lambda: None
    ready: Future[Any] | None = None
    size: int = 0
    slow: bool = False


class FileRun:
    """A file under its lease, which a heartbeat renews from the first part to the end."""

    def __init__(
        self,
        catalogue: Catalogue,
        lease: FileLease,
        seconds: float,
        first: Callable[[Hold], Rest | None],
        job_status: JobStatus,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Do the first part. It gives the rest, or None if it has ended the file."""
        self._catalogue, self._lease = catalogue, lease
        self._hold = Hold(catalogue, lease, seconds, job_status, stopping)
        self._rest: Rest | None = None
        self._span = tracing.tracer().start_span(
            "ingest.file",
            tracing.incoming(lease.traceparent),
            attributes={"preread.job": lease.job_id, "preread.file": lease.job_file_id, "preread.attempt": lease.attempt},
        )
        self._hold.__enter__()

        def begin() -> None:
            self._rest = first(self._hold)

        self._do(begin)

    @property
    def alone(self) -> bool:
        """Whether no other file may be in hand meanwhile: an earlier run of this one failed, and perhaps killed its worker."""
        return self._lease.attempt > 0

    @property
    def waits_for(self) -> Future[Any] | None:
        """What is not done yet, and must be before the next part; None if there is nothing to wait for."""
        ready = self._rest.ready if self._rest is not None else None
        return None if ready is None or ready.done() else ready

    @property
    def tenant_id(self) -> str:
        return self._lease.tenant_id

    @property
    def size(self) -> int:
        """Characters of text that are held for it."""
        return self._rest.size if self._rest is not None else 0

    @property
    def slow(self) -> bool:
        """Whether the next part may take minutes."""
        return self._rest is not None and self._rest.slow

    @property
    def ended(self) -> bool:
        return self._rest is None

    def look(self) -> None:
        """If its job is cancelled, or its lease lost, it ends here."""
        if self._rest is not None:
            self._do(self._hold.check)

    def leave(self) -> None:
        """Do no more about the file: another run may take it up at once."""
        if self._rest is not None:
            self._take_back()
            self._stop()
            self._hand_over()

    def go_on(self) -> None:
        """Do the next part, if there still is one."""
        if (rest := self._rest) is None:
            return

        def part() -> None:
            self._rest = rest.do()

        self._do(part)

    def finish(self) -> None:
        """Do all that is left."""
        while self._rest is not None:
            if (ready := self.waits_for) is None:
                self.go_on()
            else:
                wait((ready,), _LOOK_SECONDS)
                self.look()

    def _do(self, part: Callable[[], None]) -> None:
        """Do a part of the run, and end the file if that fails. Once nothing is left, the lease is renewed no more."""
        of_request = {"request_id": self._lease.request_id} if self._lease.request_id else {}
        with tracing.inside(self._span), bound_contextvars(job=self._lease.job_id, **of_request):
            self._do_here(part)

    def _do_here(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - a fault of ours in one file must not stop the others
            if isinstance(error, LeaseLost):
                self._rest = None  # what it has stored is for whoever holds the file now
            self._take_back()
            tracing.failed(self._span, error)
            self._stop()
            self._failed(error)
            return
        except BaseException:
            self._stop()
            raise
        if self._rest is None:
            self._stop()

    def _take_back(self) -> None:
        """Undo what the rest was to need, while the lease is held: so that no other run counts on it already."""
        rest, self._rest = self._rest, None
        try:
            if rest is not None:
                rest.undo()
        except Exception as error:  # noqa: BLE001 - what is left over does no harm
            log.warning("not_taken_back", file=self._lease.job_file_id, error=type(error).__name__)

    def _stop(self) -> None:
        self._hold.__exit__(None, None, None)
        self._span.end()

    # --- ends ---

    def _failed(self, error: Exception) -> None:
        lease, message = self._lease, storable(str(error))
        match error:
            case LeaseLost():
                log.info("lease_lost", job=lease.job_id, file=lease.job_file_id)
            case Stopping():
                log.info("handed_over", job=lease.job_id, file=lease.job_file_id)
                self._hand_over()
            case Cancelled():
                self.end(lambda session, row: mark_cancelled(session, row, message))
            case FileError():
                code = error.code
                log.info("file_failed", job=lease.job_id, file=lease.job_file_id, code=code)
                self.end(lambda session, row: fail(session, row, code, message))
            case UserError():  # the corpus waits for a reindex
                self.end(lambda session, row: fail(session, row, "embedding_failed", message))
            case ObjectMissing():
                self.end(lambda session, row: fail(session, row, "storage_error", "the stored file is gone"))
            case StorageUnavailable() | Overloaded():
                self._try_again("storage_error", "the store did not answer", RETRY_DELAY)
            case _:
                log.error("ingest_fault", job=lease.job_id, file=lease.job_file_id, error=type(error).__name__)
                self._try_again("worker_lost", f"the worker failed with {type(error).__name__}", 0.0)

    def end(self, end: Callable[[Session, JobFile], None]) -> None:
        end_file(self._catalogue, self._lease, end)

    def _hand_over(self) -> None:
        self._unless_cancelled(lambda session, row, job: hand_over(session, row))

    def _try_again(self, code: str, message: str, delay: float) -> None:
        def end(session: Session, row: JobFile, job: Job) -> None:
            give_back(session, row, job.max_attempts, code, message, delay * 2**row.attempt)

        self._unless_cancelled(end)

    def _unless_cancelled(self, end: Callable[[Session, JobFile, Job], None]) -> None:
        def end_or_cancel(session: Session, row: JobFile) -> None:
            job = lock_job(session, self._lease.job_id)
            if job is None or job.status == "cancelling":
                mark_cancelled(session, row)
            else:
                end(session, row, job)

        self.end(end_or_cancel)


def end_file(catalogue: Catalogue, lease: FileLease, end: Callable[[Session, JobFile], None]) -> None:
    """End a file under its lease, if that is not lost."""
    try:
        with catalogue.write() as session:
            end(session, owned(session, lease))
            settle(session, lease.job_id)
    except LeaseLost:
        log.info("lease_lost", job=lease.job_id, file=lease.job_file_id)
