"""Jobs whose files a worker finds out, in threads beside the one that works on files.

A few at once, each of another tenant: so that nobody's small source waits until another's large one has been read.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

import structlog

from ingest.leases import LeaseLost
from ingest.plans import claim_plan, fail_plan, give_back_plan, hand_over_plan, let_go, renew_plan
from storage.catalogue.engine import Catalogue
from storage.catalogue.lease import Heartbeat
from storage.catalogue.schema import Job
from storage.errors import FILE_ERROR_CODES, Cancelled, Overloaded, PrereadError, Stopping, StorageUnavailable

log = structlog.get_logger()
PLANS = 4  # jobs that are planned at once, each of another tenant
PLAN_DELAY = 5.0  # seconds until a plan is tried again whose store did not answer


class Planner(Protocol):
    def plan(self, job: Job) -> None:
        """Find out the files of a leased sync job, and store them with it."""
        ...


class Planning:
    """`planner`: None where jobs are not planned at all."""

    def __init__(self, catalogue: Catalogue, planner: Planner | None, owner: str, lease_seconds: float) -> None:
        self._catalogue, self._owner, self._lease_seconds = catalogue, owner, lease_seconds
        self.planner = planner
        self._threads = ThreadPoolExecutor(PLANS, thread_name_prefix="plan")
        self._last_tenant: str | None = None
        self._running: dict[str, Future[None]] = {}  # by tenant
        self._has_planned = threading.Event()

    def begin(self) -> None:
        """Have a job planned, if one waits of a tenant none of whose jobs is being planned here."""
        self._running = {tenant: plan for tenant, plan in self._running.items() if not plan.done()}
        if self.planner is None or len(self._running) >= PLANS:
            return
        job = claim_plan(
            self._catalogue, self._owner, self._lease_seconds, last_tenant=self._last_tenant, busy=self._running.keys()
        )
        if job is not None:
            self._last_tenant = job.tenant_id
            self._running[job.tenant_id] = self._threads.submit(self._plan, self.planner, job)

    def brings_files(self, seconds: float) -> bool:
        """Whether a job has been planned since this was asked last, or still is: after so many seconds, or when one is."""
        if running := [plan for plan in self._running.values() if not plan.done()]:
            wait(running, seconds, FIRST_COMPLETED)
            return True
        has_planned = self._has_planned.is_set()
        self._has_planned.clear()
        return has_planned

    def _plan(self, planner: Planner, job: Job) -> None:
        try:
            with Heartbeat(lambda: renew_plan(self._catalogue, job, self._lease_seconds), self._lease_seconds / 3):
                planner.plan(job)
        except LeaseLost:
            log.info("lease_lost", job=job.id)
        except Stopping:
            let_go(self._catalogue, job, lambda session, row: hand_over_plan(row))
        except Cancelled:
            let_go(self._catalogue, job, lambda session, row: None)
        except (StorageUnavailable, Overloaded):
            message = "the store did not answer"
            let_go(self._catalogue, job, lambda session, row: give_back_plan(session, row, "storage_error", message, PLAN_DELAY))
        except PrereadError as error:
            code = error.code if error.code in FILE_ERROR_CODES else "storage_error"
            said = str(error)
            let_go(self._catalogue, job, lambda session, row: fail_plan(session, row, code, said))
        except Exception as error:  # noqa: BLE001 - a fault of ours in one job must not stop the others
            log.error("plan_fault", job=job.id, error=type(error).__name__)
            fault = f"the worker failed with {type(error).__name__}"
            let_go(self._catalogue, job, lambda session, row: give_back_plan(session, row, "worker_lost", fault))
        finally:
            self._has_planned.set()
