"""What a child site keeps of its parent's objects, within a budget that all its processes share.

The rows are the ledger: an object is kept only with a row, and its bytes count until it has left the store. Who goes is decided
as by `storage.tiers.eviction.GDSF`: value = floor + uses * tokens / bytes, the lowest goes, and the floor rises to its value, so
that what nobody uses any more is overtaken in time. What the site computed itself has no row, and never goes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import KeptObject, KVObject, SiteLink

BATCH = 500
LEAVING = -1.0  # the value of a row whose object is being deleted: who dies over that leaves it to the next to go first


class Kept:
    """`budget()`: bytes, None: no limit; asked each time. `evict(keys)`: deletes their objects here, and says which keys are
    left; may raise StorageUnavailable. Safe to share between threads. A key's row goes with the key's own."""

    def __init__(
        self, catalogue: Catalogue, budget: Callable[[], int | None], evict: Callable[[Sequence[str]], Iterable[str]]
    ) -> None:
        self._catalogue, self._budget, self._evict = catalogue, budget, evict
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, key: str, size: int) -> bool:
        """Room for an object from the parent, made if need be; False where there is none, or the catalogue knows no such key.
        Write it then, and ask `holds` behind that. Raises StorageUnavailable."""
        self.flush()
        taken, victims = self._reserve(key, size)
        while victims and self._leave(victims):
            taken, victims = self._reserve(key, size)
        return taken

    def has_room(self, key: str) -> bool:
        """Whether the object of a key of the catalogue can be kept without another one leaving."""
        budget = self._budget()
        with self._catalogue.read() as session:
            size = session.scalar(select(KVObject.bytes).where(KVObject.key == key)) or 0
            return budget is None or _total(session) + size <= budget

    def holds(self, key: str) -> bool:
        """Whether the key is kept, and not about to leave."""
        with self._catalogue.read() as session:
            row = session.get(KeptObject, key)
            return row is not None and row.value > LEAVING

    def forget(self, keys: Iterable[str]) -> None:
        """These objects are gone, or are the site's own from now on."""
        with self._catalogue.write() as session:
            forget(session, keys)

    def used(self, keys: Iterable[str]) -> None:
        """Answers took these, from whatever tier. Costs no look-up now."""
        with self._lock:
            self._used.update(list(keys))  # a mapping's values are no counts

    def flush(self) -> None:
        """Write down what was used."""
        with self._lock:
            used, self._used = self._used, Counter()
        by_count: dict[int, list[str]] = {}
        for key, count in sorted(used.items()):
            by_count.setdefault(count, []).append(key)
        for count, keys in by_count.items():
            for at in range(0, len(keys), BATCH):
                with self._catalogue.write() as session:
                    uses, floor = KeptObject.uses + count, _floor(session)
                    here = KeptObject.key.in_(keys[at : at + BATCH]), KeptObject.value > LEAVING
                    value = floor + uses * 1.0 * KeptObject.tokens / KeptObject.bytes
                    session.execute(update(KeptObject).where(*here).values(uses=uses, value=value))

    def trim(self) -> None:
        """Come back within a budget that has become smaller, and finish what others have begun to evict. Raises
        StorageUnavailable."""
        while victims := self._over():
            if not self._leave(victims):
                return

    def counters(self) -> dict[str, int]:
        """Of now: `objects`, `bytes`; `capacity_bytes` where there is a budget."""
        with self._catalogue.read() as session:
            count = session.scalar(select(func.count()).select_from(KeptObject)) or 0
            found = {"objects": count, "bytes": _total(session)}
        budget = self._budget()
        return found if budget is None else {**found, "capacity_bytes": budget}

    def _reserve(self, key: str, size: int) -> tuple[bool, list[str]]:
        """Whether there is room, and is taken; else what has to leave for it first, if that helps."""
        budget = self._budget()
        with self._catalogue.write() as session:
            session.execute(select(SiteLink.site_id).with_for_update())  # one at a time, in all processes
            if (row := session.get(KeptObject, key)) is not None:
                return row.value > LEAVING, []
            tokens = session.scalar(select(KVObject.tokens).where(KVObject.key == key, KVObject.status != "purge"))
            if tokens is None or (budget is not None and size > budget):
                return False, []
            over = 0 if budget is None else _total(session) + size - budget
            if over > 0:
                return False, _mark(session, over)
            value = _floor(session) + tokens / max(size, 1)
            session.add(KeptObject(key=key, bytes=max(size, 1), tokens=tokens, uses=1, value=value))
            return True, []

    def _over(self) -> list[str]:
        budget = self._budget()
        with self._catalogue.write() as session:
            session.execute(select(SiteLink.site_id).with_for_update())
            over = 0 if budget is None else _total(session) - budget
            return _mark(session, max(over, 0))

    def _leave(self, keys: list[str]) -> int:
        """Delete the objects, then their rows; how many are gone."""
        left = set(self._evict(keys))
        gone = [key for key in keys if key not in left]
        with self._catalogue.write() as session:
            session.execute(delete(KeptObject).where(KeptObject.key.in_(gone), KeptObject.value <= LEAVING))
        return len(gone)


def forget(session: Session, keys: Iterable[str]) -> None:
    """See `Kept.forget`."""
    session.execute(delete(KeptObject).where(KeptObject.key.in_(list(keys))))


def _total(session: Session) -> int:
    return int(session.scalar(select(func.sum(KeptObject.bytes))) or 0)


def _floor(session: Session) -> float:
    return session.scalar(select(func.max(SiteLink.kept_floor))) or 0.0


def _mark(session: Session, over: int) -> list[str]:
    """Those that are leaving already, and as many more of the lowest value, up to BATCH, as free these bytes."""
    lowest = select(KeptObject).order_by(KeptObject.value, KeptObject.key).limit(BATCH)
    found, floor = list[str](), _floor(session)
    for row in session.scalars(lowest.with_for_update()):
        if over <= 0 and row.value > LEAVING:
            break
        floor = max(floor, row.value)
        row.value, over = LEAVING, over - row.bytes
        found.append(row.key)
    session.execute(update(SiteLink).values(kept_floor=floor))
    return found
