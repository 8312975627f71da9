"""The tick: every few seconds it does what nobody else would, and rings for work whose bell was not heard."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest import pushes, schedules, uploads
from ingest.jobs import ACTIVE, cancel_waiting, settle
from ingest.leases import has_work, reap_files
from ingest.plans import has_plan, reap_plans
from ingest.purge import try_sweep
from ingest.types import KVDelete, Ring
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Job, JobFile
from storage.catalogue.tombstones import prune

UPLOAD_SECONDS = 24 * 3600.0  # for which a sync waits for a content that was announced


@dataclass(frozen=True)
class Ticker:
    """Safe to run in several processes at once. `reap_kv` and `kv_has_work` are the KV queue's own; `collect` takes a few
    orphans from the object store, now and then; `apply_policy` is `placement.StorePass.tick`, `expire_versions` is
    `versions.Expiry.tick`."""

    catalogue: Catalogue
    ring: Ring
    kv_delete: KVDelete
    reap_kv: Callable[[Session], int]
    kv_has_work: Callable[[Session], bool]
    collect: Callable[[], object]
    apply_policy: Callable[[], int] = lambda: 0
    expire_versions: Callable[[], int] = lambda: 0

    def tick(self, now: float | None = None) -> None:
        """Fire schedules, return what dead workers held, settle jobs, sync what was pushed to meanwhile, delete what is marked,
        drop tombstones that every site has seen to, and ring."""
        now = time.time() if now is None else now
        schedules.tick(self.catalogue, now, self.ring)
        with self.catalogue.write() as session:
            reap(session)
            self.reap_kv(session)
            expire_uploads(session)
            uploads.expire(session, now)
        self._settle()
        self.expire_versions()
        pushes.follow(self.catalogue, self.ring, now)
        try_sweep(self.catalogue, self.kv_delete)
        prune(self.catalogue)
        self.ring_for_work()
        self.collect()
        self.apply_policy()

    def _settle(self) -> None:
        with self.catalogue.read() as session:
            active = session.scalars(select(Job.id).where(Job.status.in_(ACTIVE))).all()
        for job_id in active:
            with self.catalogue.write() as session:
                settle(session, job_id)

    def ring_for_work(self) -> None:
        with self.catalogue.read() as session:
            wanted = {"ingest": has_work(session) or has_plan(session), "precompute": self.kv_has_work(session)}
        for queue, waits in wanted.items():
            if waits:
                self.ring(queue)


def reap(session: Session) -> set[str]:
    """Return what dead workers held, or fail it after too many of them. The ids of the jobs concerned."""
    now = time.time()
    jobs = reap_files(session, now) | reap_plans(session, now)
    for job_id in sorted(jobs):
        settle(session, job_id)
    return jobs


def expire_uploads(session: Session) -> int:
    """Give up on announced contents that never came."""
    query = (
        select(JobFile.id)
        .join(Job, Job.id == JobFile.job_id)
        .where(
            Job.status.in_(ACTIVE),
            Job.created_at < time.time() - UPLOAD_SECONDS,
            JobFile.status == "pending",
            JobFile.action == "upsert",
            JobFile.file_id.is_(None),
        )
    )
    return cancel_waiting(session, query, "the content was not uploaded within a day")
