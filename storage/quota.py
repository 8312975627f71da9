"""How much a tenant has stored, and how much it may. Asked of the rows every time; nothing is counted along."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from storage.catalogue.schema import File, KVObject, Tenant
from storage.errors import QuotaExceeded


@dataclass(frozen=True)
class Usage:
    """Bytes: stored KV, uploaded files (the same content once), and the limit on both together; None: no limit."""

    kv: int
    raw: int
    limit: int | None

    @property
    def total(self) -> int:
        return self.kv + self.raw

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.total >= self.limit


def usage(session: Session, tenant_id: str) -> Usage:
    """What a tenant uses and may use."""
    kv = select(func.sum(KVObject.bytes)).where(KVObject.tenant_id == tenant_id, KVObject.status != "purge")
    contents = select(File.sha256, File.bytes).where(File.tenant_id == tenant_id).distinct().subquery()
    raw = select(func.sum(contents.c.bytes))
    limit = select(Tenant.quota_bytes).where(Tenant.id == tenant_id)
    return Usage(int(session.scalar(kv) or 0), int(session.scalar(raw) or 0), session.scalar(limit))


def is_full(session: Session, tenant_id: str) -> bool:
    """Whether the tenant may store nothing more. Sums only where there is a limit."""
    limited = session.scalar(select(Tenant.quota_bytes).where(Tenant.id == tenant_id)) is not None
    return limited and usage(session, tenant_id).is_full


def check_room(session: Session, tenant_id: str, more: int) -> None:
    """Raises QuotaExceeded if `more` bytes would go over the tenant's limit."""
    if session.scalar(select(Tenant.quota_bytes).where(Tenant.id == tenant_id)) is None:
        return
    used = usage(session, tenant_id)
    if used.limit is not None and used.total + more > used.limit:
        raise QuotaExceeded(
            f"This file of {more} bytes does not fit: {used.total} of the {used.limit} bytes of this tenant's quota are "
            "in use. Delete documents or files, or have the operator raise the quota."
        )
