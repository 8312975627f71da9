"""What a process stores in, keeps at hand, forgets and repairs: the storage half of `Wiring` and all of a
connector's parts."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from sqlalchemy import select

from serving.settings import Settings, data_folder, master_secret
from storage.catalogue.audit import audit_key
from storage.catalogue.engine import Catalogue, migrate, open_catalogue
from storage.catalogue.facts import stored_chunks
from storage.catalogue.schema import KVObject
from storage.errors import StorageUnavailable, UserError
from storage.kvstore import KVStore
from storage.objects import open_store
from storage.policy.file import PolicyFile
from storage.tier_control import ChainControl, TierControl
from storage.tiers.disk import DiskTier, empty_abandoned
from storage.tiers.types import Extent
from storage.types import KVProfile, Miss, ObjectStore

if TYPE_CHECKING:
    from ingest.site_sync import SiteSync
    from serving.parent_site import ParentSite
    from serving.placement import Placement

log = structlog.get_logger(__name__)
DEVICE_SHARE = 10  # one part in so many of an accelerator's memory is for stored KV
FORGET_BATCH = 5000  # of the keys on disk are compared with the catalogue in one tick


class StorageParts(ABC):
    """The parts of one process that store, each made when it is first asked for, and once."""

    def __init__(self, settings: Settings, *, memory_bytes: int = 0, disk_bytes: int = 0) -> None:
        """`memory_bytes`, `disk_bytes`: for stored KV, in a process that answers questions."""
        self.settings = settings
        self.owner = f"{socket.gethostname()[:20]}-{os.getpid()}"
        self._memory_bytes, self._disk_bytes = memory_bytes, disk_bytes
        self._disk_keys: list[str] = []  # still to be compared with the catalogue
        self._closers: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def ring(self) -> Callable[[str], None]:
        """Tells the workers of a queue that rows wait."""

    def close(self) -> None:
        """End what was started: parser children, the engine, connections."""
        while self._closers:
            self._closers.pop()()

    @abstractmethod
    def stored_as(self, codec: str | None, newest: str, since: float) -> KVProfile | None:
        """What records are read as that a rule has stored with this codec (None: no rule), of which the newest has this key
        and is owed since then; None where the model is not blended, or its profile not known."""
        ...

    @cached_property
    def secret(self) -> bytes:
        return master_secret(self.settings)

    @cached_property
    def catalogue(self) -> Catalogue:
        data_folder(self.settings)
        migrate(self.settings.database)
        catalogue = open_catalogue(self.settings.database, audit_key(self.secret))
        self._closers.append(catalogue.close)
        return catalogue

    @cached_property
    def objects(self) -> ObjectStore:
        s = self.settings
        store = open_store(
            s.objects,
            s3_endpoint=s.s3_endpoint or None,
            s3_access_key=s.s3_access_key or None,
            s3_secret_key=s.s3_secret_key or None,
            s3_region=s.s3_region,
        )
        return self._sealed(store) if s.encryption_keys else store

    def _sealed(self, store: ObjectStore) -> ObjectStore:
        from storage.sealed import SealedStore

        words = [word.strip() for word in self.settings.encryption_keys.split(",")]
        return SealedStore(store, [self.secret if w == "master" else w.encode() for w in words], self._owner)

    def _owner(self, name: str) -> str:
        """Whose an object is: a file's tenant, which its name tells, or a chunk's sharing group, which its row tells."""
        room, _, rest = name.partition("/")
        if room != "kv":
            return rest.partition("/")[0]
        with self.catalogue.read() as session:
            return session.scalar(select(KVObject.sharing_group).where(KVObject.key == rest.rpartition("/")[2])) or ""

    @cached_property
    def parent(self) -> ParentSite | None:
        """The parent site, if this one has any."""
        if not self.settings.parent_url:
            return None
        from serving.parent_site import ParentSite

        parent = ParentSite(self.settings, self.catalogue, self.objects, self._is_needed, self._kept_budget)
        self._closers.append(parent.peer.close)
        return parent

    @cached_property
    def site_sync(self) -> SiteSync:
        if self.parent is None:
            raise UserError("this site has no parent: PREREAD_PARENT_URL is not set")
        return self.parent.sync(self.delete_kv)

    def _kept_budget(self) -> int | None:
        return self.policy.current().kept_bytes

    def _is_needed(self, key: str) -> bool:
        with self.catalogue.read() as session:
            return session.scalar(select(KVObject.status).where(KVObject.key == key)) not in (None, "purge")

    @property
    def kv_objects(self) -> ObjectStore:
        """Where KV is read: at a child site the parent's is there too."""
        return self.parent.objects if self.parent else self.objects

    @cached_property
    def kv_store(self) -> KVStore:
        parent = self.parent
        options: dict[str, Any] = {
            "device": self.settings.device, "device_bytes": self._device_bytes(), "disk": self._disk_tier(),
        }  # fmt: skip
        if parent is None:
            return KVStore(self.kv_objects, self._memory_bytes, on_damage=lambda key, _: self.repair(key), **options)
        from storage.lease import LeasedKVStore

        return LeasedKVStore(
            self.kv_objects, self._memory_bytes, on_damage=self._damaged_copy, lease=parent.lease, **options
        )

    def _damaged_copy(self, key: str, miss: Miss) -> None:
        """The parent's object takes its place, or if it has none, one that is computed here."""
        if self.parent is not None:
            self.parent.objects.drop(key)
        self.repair(key)

    # --- the operator's policy ---

    @cached_property
    def policy(self) -> PolicyFile:
        return PolicyFile(Path(self.settings.policy_file) if self.settings.policy_file else None)

    @cached_property
    def tiers(self) -> TierControl:
        return ChainControl(self.kv_store.chain, self._by_profile)

    def _by_profile(self, keys: Collection[str]) -> dict[KVProfile, dict[str, Extent]]:
        """Keys of chunks, and their sizes, by the profile under which their records are read."""
        with self.catalogue.read() as session:
            chunks = stored_chunks(session, keys)
        found: dict[KVProfile, dict[str, Extent]] = {}
        for codec in {chunk.codec for chunk in chunks.values()}:
            some = {key: chunk for key, chunk in chunks.items() if chunk.codec == codec}
            newest = max(some, key=lambda key: some[key].owed_at)
            if (profile := self.stored_as(codec, newest, some[newest].owed_at)) is not None:
                extents = {key: Extent.of(profile, chunk.tokens, chunk.bytes) for key, chunk in some.items()}
                found.setdefault(profile, {}).update(extents)
        return found

    @cached_property
    def placement(self) -> Placement:
        from serving.placement import Placement

        return Placement(self.catalogue, self.policy, self.tiers)

    # --- tiers ---

    def _device_bytes(self) -> int:
        """A part of an accelerator's memory; on a CPU, host memory is the device's."""
        if not self._memory_bytes or not self.settings.device.startswith("cuda"):
            return 0
        import torch

        return torch.cuda.get_device_properties(self.settings.device).total_memory // DEVICE_SHARE

    def _disk_tier(self) -> DiskTier | None:
        folder = self.settings.data_dir / "cache"
        if not self.settings.disk_cache:
            empty_abandoned(folder)  # from when the setting was another
        if not self._disk_bytes:
            return None
        try:
            disk = DiskTier(folder, self._disk_bytes)
        except StorageUnavailable as error:
            log.warning("no disk tier", error=str(error))
            return None
        self._closers.append(disk.close)
        return disk

    # --- deletion and repair ---

    def delete_kv(self, keys: Sequence[str]) -> Collection[str]:
        left = self.kv_store.delete(keys)
        self._forget(keys)
        return left

    def _forget(self, keys: Collection[str]) -> None:
        """From all memory of this process, without making an engine where there is none."""
        self.kv_store.forget(keys)
        if (engine := self.__dict__.get("engine")) is not None:
            engine.forget(keys)

    def repair(self, key: str) -> None:
        """Have a stored object computed again that was found damaged or absent."""
        from precompute.rows import request_repair

        with self.catalogue.write() as session:
            owed = request_repair(session, key)
        if owed:
            self.ring("precompute")

    def _held(self) -> set[str]:
        """The keys of all stored KV in this process's memory."""
        held = set(self.kv_store.keys_in_memory())
        if (engine := self.__dict__.get("engine")) is not None:
            held |= engine.keys_in_memory()
        return held

    def stay_in_step(self) -> float:
        """Forget what was deleted, and look whether stored KV may be used; the seconds after which to look again."""
        if self.parent is None:
            self.forget_deleted()
            return self.settings.tick_seconds
        lease = self.parent.lease
        lease.look(self.parent.exchanges, self.forget_deleted)
        if not lease.held():
            self._forget(self._held())  # also what an answer under way is about to keep
        return min(self.settings.tick_seconds, max(lease.left(), 0.01)) if lease.held() else self.settings.tick_seconds

    def forget_deleted(self) -> int:
        """Drop from this process's memory and disk what any process has deleted from the catalogue; how many records.

        Of what lies on disk, a part is looked at each time."""
        self.kv_store.chain.reclaim()
        self._disk_keys = self._disk_keys or self.kv_store.chain.keys("disk")
        held = {*self._held(), *self._disk_keys[:FORGET_BATCH]}
        del self._disk_keys[:FORGET_BATCH]
        gone = set(held)
        with self.catalogue.read() as session:
            for keys in (list(held)[start : start + 500] for start in range(0, len(held), 500)):
                kept = select(KVObject.key).where(KVObject.key.in_(keys), KVObject.status != "purge")
                gone -= set(session.scalars(kept))
        if gone:
            self._forget(gone)
        return len(gone)

    def missed(self, key: str, miss: Miss) -> str:
        """Why a chunk's KV was not used, as the answer reports it; what ought to be stored is owed again."""
        if miss is not Miss.ABSENT:
            return str(miss)
        with self.catalogue.read() as session:
            status = session.scalar(select(KVObject.status).where(KVObject.key == key))
        if status in ("pending", "leased"):
            return "pending"
        if status == "over_quota":
            return status
        if status == "done":
            self.repair(key)
        return str(miss)
