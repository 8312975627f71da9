"""A process's ties to its parent site, made of the two settings; where they are not set there is none of this."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import structlog

from ingest.site_sync import SiteSync
from ingest.types import KVDelete
from precompute.types import Elsewhere
from serving.settings import Settings
from storage.catalogue.engine import Catalogue
from storage.catalogue.kept import Kept
from storage.catalogue.schema import SiteLink
from storage.errors import StorageUnavailable
from storage.keys import group_secret
from storage.lease import Lease
from storage.peer import PeerStore
from storage.readthrough import ReadThrough
from storage.site_key import SiteKey
from storage.tiers.store import object_name
from storage.types import ObjectStore

log = structlog.get_logger(__name__)
LEASE_TICKS = 15  # a parent that has not answered for so many ticks is one we are cut off from
EXCHANGE_TICKS = 2.5


class ParentSite:
    """The parent, its key, and what is between the two. `wanted(key)`: whether a row of the catalogue needs the object."""

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        objects: ObjectStore,
        wanted: Callable[[str], bool],
        budget: Callable[[], int | None],
    ) -> None:
        """Raises UserError for an address or a key that is none."""
        self.key = SiteKey.parse(settings.parent_key)
        self.peer = PeerStore(settings.parent_url, self.key)
        self.kept = Kept(catalogue, budget, partial(_delete, objects))
        self.objects = ReadThrough(objects, self.peer, wanted, self.kept)
        self.lease = Lease(LEASE_TICKS * settings.tick_seconds, EXCHANGE_TICKS * settings.tick_seconds)
        self._catalogue = catalogue

    def group_secret(self, master: bytes, group: str) -> bytes:
        """The parent's secret of a group that the two share, or else this site's own."""
        return self.key.groups.get(group) or group_secret(master, group)

    def elsewhere(self, keys: Sequence[str]) -> Elsewhere:
        """What the parent has of these. A parent that does not answer has nothing: the work is done here."""
        if not keys:
            return Elsewhere()
        try:
            found = self.peer.call("compare", {"keys": list(keys)})
        except StorageUnavailable as error:
            log.warning("parent site not asked", error=str(error))
            return Elsewhere()
        return Elsewhere(found["stored"], frozenset(found["awaited"]))

    def stored(self, keys: Sequence[str]) -> Collection[str]:
        """Which of these the parent stores: they need not be here."""
        return self.elsewhere(keys).stored.keys()

    def sync(self, kv_delete: KVDelete) -> SiteSync:
        return SiteSync(
            self._catalogue,
            self.peer,
            self.key,
            kv_delete,
            pull=self.objects.pull,
            lease_s=self.lease.seconds,
            exchange_s=EXCHANGE_TICKS / LEASE_TICKS * self.lease.seconds,
        )

    def link(self) -> SiteLink | None:
        """How far this site is, as its catalogue has it; None before the first exchange."""
        with self._catalogue.read() as session:
            return session.get(SiteLink, self.key.site_id)

    def exchanges(self) -> int:
        """How many exchanges have left this site in step, of all that any process has made."""
        link = self.link()
        return link.syncs if link is not None else 0


def _delete(objects: ObjectStore, keys: Sequence[str]) -> list[str]:
    """The keys whose objects the store would not delete."""
    left = objects.delete_many([object_name(key) for key in keys])
    return [name.rpartition("/")[2] for name in left]
