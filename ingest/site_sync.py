"""A child site's side of its parent: erase what was deleted there, say so, and fetch what is to be held here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sqlalchemy import case, delete, select, update
from sqlalchemy.orm import Session

from ingest.types import KVDelete
from storage.catalogue.engine import Catalogue
from storage.catalogue.insert import insert_into
from storage.catalogue.kept import forget
from storage.catalogue.schema import KVObject, SiteLink
from storage.catalogue.sites import PAGE
from storage.errors import ObjectMissing, StorageUnavailable
from storage.site_key import SiteKey


class ParentCalls(Protocol):
    def call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises StorageUnavailable."""
        ...


@dataclass
class SiteSync:
    """`lease_s`: for how long a process may use stored KV after an exchange; `exchange_s`: what takes longer does not renew
    it. `pull(key)` has an object here, and gives the bytes fetched."""

    catalogue: Catalogue
    parent: ParentCalls
    key: SiteKey
    kv_delete: KVDelete
    pull: Callable[[str], int]
    lease_s: float
    exchange_s: float
    clock: Callable[[], float] = time.monotonic
    _reached: deque[tuple[int, float]] = field(default_factory=deque)  # (cursor, since when at the latest)
    _erased: int = 0

    def step(self) -> bool:
        """One exchange; whether the site is in step with its parent. Raises StorageUnavailable: nothing is lost by it."""
        cursor = self._link().cursor
        if cursor is None:
            cursor = self._compare()
        begun = self.clock()
        reply = self.parent.call("sync", {"cursor": cursor, "erased": self._erased_up_to(cursor)})
        if reply["reset"]:
            self._note(cursor=None)
            return False
        self._erase(reply["erase"])
        in_step = reply["cursor"] == reply["newest"] and self.clock() - begun <= self.exchange_s
        renewed: dict[str, Any] = {"syncs": SiteLink.syncs + 1, "synced_at": time.time()} if in_step else {}
        reached = case((SiteLink.cursor > reply["cursor"], SiteLink.cursor), else_=reply["cursor"])  # another was faster
        self._note(cursor=reached, newest=reply["newest"], **renewed)
        return in_step

    def _erased_up_to(self, cursor: int) -> int:
        """The number up to which no process here can use anything any more: for as long as a lease lasts, store and
        catalogue have been without it, so that every process has looked since, or has lost its leave."""
        now = self.clock()
        if cursor != (self._reached[-1][0] if self._reached else self._erased):
            self._reached.append((cursor, now))
        while self._reached and self._reached[0][1] + self.lease_s <= now:
            self._erased = self._reached.popleft()[0]
        return self._erased

    def _erase(self, keys: Sequence[str]) -> None:
        """From the catalogue, so that other processes forget them, then from the store; the rows go last."""
        if not keys:
            return
        with self.catalogue.write() as session:
            for row in _locked(session, keys):
                row.status, row.lease_owner, row.lease_expires = "purge", None, None
        self._delete(keys)
        with self.catalogue.write() as session:
            session.execute(delete(KVObject).where(KVObject.key.in_(keys), KVObject.status == "purge"))

    def _delete(self, keys: Sequence[str]) -> None:
        """All of them, or StorageUnavailable: what is still here must not be told to be erased."""
        if left := self.kv_delete(keys):
            raise StorageUnavailable(f"the object store would not delete {len(left)} objects")

    # --- the first exchange of a registration, or after either catalogue was restored from a backup ---

    def _compare(self) -> int:
        """Erase all that the parent does not have: it may have been deleted there while nobody told this site. The chunks
        that still refer to it are the site's own, and are computed again. The number from which tombstones go on."""
        newest: int = self.parent.call("sync", {"cursor": None, "erased": 0})["newest"]
        after = ""
        while keys := self._stored(after):
            found = self.parent.call("compare", {"keys": keys})["stored"]
            gone = [key for key in keys if key not in found]
            self._delete(gone)
            with self.catalogue.write() as session:
                forget(session, gone)
                for row in _locked(session, gone):
                    row.status, row.attempt, row.job_id = "pending", 0, None
            after = keys[-1]
        self._reached.clear()
        self._erased = 0
        self._note(cursor=newest)
        return newest

    def _stored(self, after: str) -> list[str]:
        query = select(KVObject.key).where(KVObject.status == "done", KVObject.key > after)
        query = query.where(KVObject.sharing_group.in_(list(self.key.groups))).order_by(KVObject.key)
        with self.catalogue.read() as session:
            return list(session.scalars(query.limit(PAGE)))

    # --- replication ---

    def replicate(self, seconds: float) -> int:
        """Go on fetching what this site is to hold and lacks; objects fetched. What its documents do not refer to is left
        out. Raises StorageUnavailable; the next call goes on where this one ended."""
        end, after, objects, size = self.clock() + seconds, self._link().pull_after, 0, 0
        keys = self.parent.call("wanted", {"after": after})["keys"]
        ours = self._ours(keys)
        try:
            for key in keys:
                if self.clock() >= end:
                    break
                if key in ours:
                    fetched = self._pull(key)
                    objects, size = objects + bool(fetched), size + fetched
                after = key
            else:
                after = after if len(keys) == PAGE else ""  # and round again, for what has come since or was lost
        finally:
            counts = {"pulled_objects": SiteLink.pulled_objects + objects, "pulled_bytes": SiteLink.pulled_bytes + size}
            self._note(pull_after=after, **counts)
        return objects

    def _pull(self, key: str) -> int:
        try:
            return self.pull(key)
        except ObjectMissing:
            return 0  # deleted there since it was listed

    def _ours(self, keys: Sequence[str]) -> set[str]:
        with self.catalogue.read() as session:
            return set(session.scalars(select(KVObject.key).where(KVObject.key.in_(keys), KVObject.status == "done")))

    # --- the link's row ---

    def _link(self) -> SiteLink:
        with self.catalogue.read() as session:
            link = session.get(SiteLink, self.key.site_id)
        if link is not None:
            return link
        with self.catalogue.write() as session:
            session.execute(insert_into(session, SiteLink).values(site_id=self.key.site_id).on_conflict_do_nothing())
            return session.get_one(SiteLink, self.key.site_id)

    def _note(self, **values: Any) -> None:
        with self.catalogue.write() as session:
            session.execute(update(SiteLink).where(SiteLink.site_id == self.key.site_id).values(**values))


def _locked(session: Session, keys: Sequence[str]) -> Sequence[KVObject]:
    query = select(KVObject).where(KVObject.key.in_(keys)).order_by(KVObject.key).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).all()

