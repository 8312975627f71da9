"""Receipts of deletions: what was deleted here, and how far each site is with it."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from ingest.deletes import Receipt, record_purge
from serving.api.parts import ApiParts
from serving.auth import Principal
from storage.catalogue import sites, tombstones
from storage.catalogue.schema import Job
from storage.errors import NotFound


def record(
    parts: ApiParts, who: Principal, corpus_id: str, receipt: Receipt, what: dict[str, Any]
) -> dict[str, Any]:
    """Keep the receipt of a deletion that has been done; what its answer says of it."""
    newest = tombstones.newest(parts.catalogue)
    with parts.catalogue.write() as session:
        job = record_purge(session, who.tenant_id, corpus_id, receipt, what, newest)
        return {"receipt": receipt, "job_id": job.id, "sites": _sites(session, job)}


def show(parts: ApiParts, who: Principal, job_id: str) -> dict[str, Any]:
    """The receipt of a deletion, with each site as it is now. Raises NotFound."""
    with parts.catalogue.read() as session:
        job = session.get(Job, job_id)
        unseen = job is None or job.tenant_id != who.tenant_id or not who.sees(job.corpus_id)
        if job is None or unseen or "receipt" not in job.result:
            raise NotFound(f"No such purge: {job_id!r}")
        shown = _sites(session, job)
    done = all(site["state"] != "pending" for site in shown)
    return {
        "id": job.id,
        "object": "purge",
        "status": "completed" if done else "in_progress",
        "created_at": job.created_at,
        "receipt": job.result["receipt"],
        "sites": shown,
    }


def _sites(session: Session, job: Job) -> list[dict[str, Any]]:
    return sites.receipt(session, job.tenant_id, job.result.get("tombstone", 0), job.created_at)
