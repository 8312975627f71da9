"""A parent's side of its sites: which KV each may hold, what each is to hold, and what each has erased.

All of it is asked of the catalogue when it is needed: a site may hold an object as long as a chunk in one of its corpora
refers to it, and not a moment longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, exists, func, or_, select
from sqlalchemy.orm import Session

from storage.catalogue.insert import insert_into
from storage.catalogue.schema import ChunkRow, KVObject, Site, SiteErasure, SiteWanted, Tombstone

PAGE = 500  # keys in one question or answer between sites


def live(session: Session, site_id: str) -> Site | None:
    """The site, unless it is unknown or was removed."""
    site = session.get(Site, site_id)
    return site if site is not None and site.removed_at is None else None


def allowed(site: Site, corpora: Sequence[str] | None = None) -> ColumnElement[bool]:
    """Of KVObject: a chunk in one of the site's corpora refers to it (of these corpora, if named)."""
    conditions = [ChunkRow.kv_key == KVObject.key, ChunkRow.tenant_id == site.tenant_id]
    for narrowed in (site.corpora, corpora):
        if narrowed is not None:
            conditions.append(ChunkRow.corpus_id.in_(narrowed))
    return exists().where(*conditions)


def states(session: Session, site: Site, keys: Iterable[str]) -> tuple[dict[str, int], list[str]]:
    """Of these keys, those that the site may hold: bytes by key of what is stored, and what is still being computed."""
    query = select(KVObject.key, KVObject.status, KVObject.bytes).where(KVObject.key.in_(list(keys)), allowed(site))
    rows = session.execute(query).all()
    stored = {row.key: row.bytes for row in rows if row.status == "done"}
    return stored, [row.key for row in rows if row.status in ("pending", "leased")]


def erasures(session: Session, site: Site, cursor: int, newest: int) -> tuple[list[str], int]:
    """A page of keys that the site may no longer hold, and the number up to which that is all."""
    query = select(Tombstone.seq, Tombstone.key).where(Tombstone.seq > cursor, Tombstone.seq <= newest)
    rows = session.execute(query.order_by(Tombstone.seq).limit(PAGE)).all()
    mine = select(Tombstone.key).where(Tombstone.seq.in_([row.seq for row in rows]))
    mine = mine.where(Tombstone.sharing_group.in_(site.groups))
    keys = set(session.scalars(mine))
    stored, awaited = states(session, site, keys)
    return sorted(keys - stored.keys() - set(awaited)), rows[-1].seq if len(rows) == PAGE else newest


def acknowledge(session: Session, site: Site, erased: int, at: float) -> None:
    """Write down that the site has erased everything up to this number."""
    if erased > site.erased:
        site.erased = erased
        session.add(SiteErasure(site_id=site.id, seq=erased, at=at))


# --- replication ---------------------------------------------------------------------------------------------


def replicate(session: Session, site: Site, keys: Iterable[str]) -> None:
    """The site is to hold these objects, as soon as they are stored and as long as it may. Saying it again is no error."""
    rows = [{"site_id": site.id, "key": key} for key in sorted(set(keys))]
    for start in range(0, len(rows), PAGE):
        session.execute(insert_into(session, SiteWanted).values(rows[start : start + PAGE]).on_conflict_do_nothing())


def wanted(session: Session, site: Site, after: str) -> list[str]:
    """A page of the keys behind `after` that the site is to hold and may have now."""
    named = exists().where(SiteWanted.site_id == site.id, SiteWanted.key == KVObject.key)
    told = or_(named, allowed(site, site.pushed)) if site.pushed else named
    query = select(KVObject.key).where(KVObject.status == "done", KVObject.key > after, told, allowed(site))
    return list(session.scalars(query.order_by(KVObject.key).limit(PAGE)))


# --- receipts ------------------------------------------------------------------------------------------------


def receipt(session: Session, tenant_id: str, seq: int, deleted_at: float) -> list[dict[str, Any]]:
    """What became of a deletion at each site that was there: erased at a time, pending, or beyond reach since it was
    removed before it had answered."""
    first = select(SiteErasure.site_id, func.min(SiteErasure.at).label("at")).where(SiteErasure.seq >= seq)
    erased = {row.site_id: row.at for row in session.execute(first.group_by(SiteErasure.site_id))}
    rows = session.scalars(_present(tenant_id, deleted_at).order_by(Site.name, Site.created_at))
    return [_outcome(site, erased.get(site.id) or (deleted_at if site.erased >= seq else None)) for site in rows]


def _present(tenant_id: str, at: float) -> Select[Any]:
    there = or_(Site.removed_at.is_(None), Site.removed_at > at)
    return select(Site).where(Site.tenant_id == tenant_id, Site.created_at <= at, there)


def _outcome(site: Site, erased_at: float | None) -> dict[str, Any]:
    state, at = "erased", erased_at
    if erased_at is None:
        state, at = ("pending", None) if site.removed_at is None else ("removed", site.removed_at)
    return {"site": site.name, "site_id": site.id, "state": state, "at": at}
