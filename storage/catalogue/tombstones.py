"""What other sites have to erase: the KV keys that chunks ceased to refer to, in one order that never changes.

A tombstone is written in the transaction that takes the chunk away, and numbered later, in a transaction of its own, one
at a time. Were it numbered when written, a deletion that commits late would have a number below those already handed out,
and a site that had asked meanwhile would never hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, exists, func, insert, select, text, update
from sqlalchemy.orm import Session

from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import KVObject, Site, SiteWanted, Tombstone

_LOCK = 0x746F6D62  # any number, as long as every process uses the same


def bury(session: Session, rows: Iterable[KVObject]) -> None:
    """Have every site look again at whether it may hold these objects, of which a chunk has gone."""
    found = [{"key": row.key, "sharing_group": row.sharing_group} for row in rows]
    if found:
        session.execute(insert(Tombstone), found)


def newest(catalogue: Catalogue) -> int:
    """Number what has been committed and has no number yet; the highest number given, 0 if none was ever."""
    with catalogue.read() as session:
        if session.scalar(select(Tombstone.id).where(Tombstone.seq.is_(None)).limit(1)) is None:
            return _highest(session)
    with catalogue.write() as session:
        if catalogue.dialect == "postgresql":
            session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        highest = _highest(session)
        place = func.row_number().over(order_by=Tombstone.id)
        fresh = select(Tombstone.id, place.label("place")).where(Tombstone.seq.is_(None)).subquery()
        numbered = update(Tombstone).where(Tombstone.id == fresh.c.id).values(seq=highest + fresh.c.place)
        session.execute(numbered.execution_options(synchronize_session=False))
        return _highest(session)


def prune(catalogue: Catalogue) -> None:
    """Drop what every site has erased, and wishes for objects that are no more. The newest tombstone stays, so that numbers
    go on from it."""
    highest = newest(catalogue)
    with catalogue.read() as session:
        slowest = session.scalar(select(func.min(Site.erased)).where(Site.removed_at.is_(None)))
        erased = Tombstone.seq < (highest if slowest is None else min(highest, slowest))
        if session.scalar(select(Tombstone.id).where(erased).limit(1)) is None:
            return
    with catalogue.write() as session:
        session.execute(delete(Tombstone).where(erased))
        session.execute(delete(SiteWanted).where(~exists().where(KVObject.key == SiteWanted.key)))


def _highest(session: Session) -> int:
    return session.scalar(select(func.max(Tombstone.seq))) or 0
