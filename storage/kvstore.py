"""The front door to stored KV: records in, records or the reason for a miss out."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import torch

from storage.codecs.shelf import CodecShelf
from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable
from storage.format import decode, encode
from storage.memory import MemoryTier
from storage.types import KVProfile, KVRecord, Miss, ObjectStore

MAX_OBJECT_BYTES = 4 << 30  # whatever calls itself larger is not one of ours
READERS_PER_CALL = 4
MAX_READERS = 32  # a store that stalls holds threads until its time-out; this bounds how many
# What was read is not what belongs under the key: worth computing again and putting in its place.
DAMAGE = frozenset({Miss.DAMAGED, Miss.WRONG_KEY, Miss.WRONG_LAYOUT})

_KEY = re.compile(r"[0-9a-f]{64}")


class KVStore:
    """Records by key in an object store, with up to `memory_bytes` of those read last kept in memory.

    A record handed out may be shared with other readers: never write to its tensor. `on_damage(key, miss)` is
    called in the caller's thread for an object that is there but wrong; who computes the record again and
    `put`s it repairs the object in place. Safe to share between threads.
    """

    def __init__(
        self,
        objects: ObjectStore,
        memory_bytes: int = 0,
        on_damage: Callable[[str, Miss], None] | None = None,
    ) -> None:
        self._objects = objects
        self.codecs = CodecShelf(objects)
        self._memory = MemoryTier(memory_bytes)
        self._on_damage = on_damage
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._readers = threading.BoundedSemaphore(MAX_READERS)

    def put(self, record: KVRecord) -> int:
        """Stores the record, over whatever is there; the number of bytes written.

        Raises ValueError where the record contradicts its profile, its key is none or its codec cannot hold it, and
        StorageUnavailable."""
        if not _KEY.fullmatch(record.key):
            raise ValueError("a record's key is 64 lower-case hex digits")
        parts = encode(record, self.codecs.required(record.profile.codec))
        written = self._objects.put(_name(record.key), parts)
        self._count(puts=1, bytes_written=written)
        return written

    def get(self, key: str, profile: KVProfile) -> KVRecord | Miss:
        """The record, or why there is none; never an exception. Waits as long as the store does."""
        record = self._memory.get(key)
        if record is not None:
            return self._from_memory(record, profile)
        return self._settle(key, self._read(key, profile))

    def get_many(
        self, keys: Iterable[str], profile: KVProfile, deadline_s: float
    ) -> dict[str, KVRecord | Miss]:
        """Like `get` for every key at once; what has not arrived after `deadline_s` is Miss.TIMEOUT."""
        found: dict[str, KVRecord | Miss] = {}
        wanted = []
        for key in dict.fromkeys(keys):
            record = self._memory.get(key)
            if record is None:
                wanted.append(key)
            else:
                found[key] = self._from_memory(record, profile)
        read = self._read_parallel(wanted, profile, time.monotonic() + deadline_s) if wanted else {}
        for key in wanted:
            found[key] = self._settle(key, read.get(key, Miss.TIMEOUT))
        return found

    def delete(self, keys: Iterable[str]) -> int:
        """Deletes the objects and forgets them; how many there were.

        Raises StorageUnavailable; some may be deleted by then, so call it again."""
        keys = list(keys)
        try:
            deleted = sum(self._objects.delete(_name(key)) for key in keys if _KEY.fullmatch(key))
        finally:
            self.forget(keys)  # last, so that no reader can bring back what it read just before
        self._count(deletes=deleted)
        return deleted

    def keys_in_memory(self) -> list[str]:
        """The records that this process would answer without asking the store."""
        return self._memory.keys()

    def forget(self, keys: Iterable[str]) -> None:
        """Drops these records from memory: for objects that another process has deleted."""
        self._memory.forget(keys)

    def counters(self) -> dict[str, int]:
        """A snapshot: hits (of those hits_memory), miss_<reason>, puts, deletes, bytes_read, bytes_written,
        memory_bytes in use."""
        names = ["hits", "hits_memory", *(f"miss_{miss}" for miss in Miss)]
        names += ["puts", "deletes", "bytes_read", "bytes_written"]
        with self._counts_lock:
            snapshot = {name: self._counts[name] for name in names}
        return snapshot | {"memory_bytes": self._memory.used_bytes}

    # --- one record -------------------------------------------------------------------------------------

    def _read(self, key: str, profile: KVProfile) -> KVRecord | Miss:
        """From the store, verified; kept in memory unless it was forgotten meanwhile."""
        if not _KEY.fullmatch(key):
            return Miss.ABSENT
        generation = self._memory.generation
        codec = self.codecs.find(profile.codec)
        if isinstance(codec, Miss):
            return codec
        try:
            buffer = self._load(_name(key))
        except ObjectMissing:
            return Miss.ABSENT
        except StorageTimeout:
            return Miss.TIMEOUT
        except StorageUnavailable:
            return Miss.UNAVAILABLE
        if buffer is None:
            return Miss.DAMAGED
        outcome = decode(buffer, key, profile, codec)
        if isinstance(outcome, KVRecord):
            # The object's buffer if `kv` is a view of it, else what was decoded.
            self._memory.add(outcome, outcome.kv.untyped_storage().nbytes(), generation)
        return outcome

    def _load(self, name: str) -> torch.Tensor | None:
        """The whole object as uint8 [size], read in place; None if its size cannot be right."""
        size = self._objects.size(name)
        if size is None:
            raise ObjectMissing(f"no object {name}")
        if size > MAX_OBJECT_BYTES:
            return None
        buffer = torch.empty(size, dtype=torch.uint8)
        count = self._objects.read_into(name, buffer.numpy().data)
        self._count(bytes_read=count)
        return buffer if count == size else None

    def _from_memory(self, record: KVRecord, profile: KVProfile) -> KVRecord | Miss:
        if record.profile != profile:
            return self._settle(record.key, Miss.WRONG_LAYOUT)
        self._count(hits=1, hits_memory=1)
        return record

    def _settle(self, key: str, outcome: KVRecord | Miss) -> KVRecord | Miss:
        """Counts what the caller is going to get, and reports damage."""
        if isinstance(outcome, KVRecord):
            self._count(hits=1)
            return outcome
        self._count(**{f"miss_{outcome}": 1})
        if outcome in DAMAGE and self._on_damage is not None:
            self._on_damage(key, outcome)
        return outcome

    def _count(self, **amounts: int) -> None:
        with self._counts_lock:
            self._counts.update(amounts)

    # --- many records -----------------------------------------------------------------------------------

    def _read_parallel(
        self, keys: Sequence[str], profile: KVProfile, end: float
    ) -> dict[str, KVRecord | Miss]:
        """What has been read by `end`. Readers that still wait for the store are left behind."""
        batch = _Batch(keys)
        for number in range(min(READERS_PER_CALL, len(keys))):
            # The first reader is waited for, more are taken only if free.
            if not self._readers.acquire(timeout=0 if number else max(0.0, end - time.monotonic())):
                break
            # Daemons, not a pool: a pool is joined at exit, where a stalled store would hold the process.
            threading.Thread(target=self._work, args=(batch, profile), name="kv-reader", daemon=True).start()
        return batch.collect(end)

    def _work(self, batch: _Batch, profile: KVProfile) -> None:
        try:
            while (key := batch.take()) is not None:
                outcome: KVRecord | Miss = Miss.UNAVAILABLE
                try:
                    outcome = self._read(key, profile)
                finally:
                    batch.deposit(key, outcome)
        finally:
            self._readers.release()


class _Batch:
    """The work list of one get_many, shared between its caller and its readers."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._todo = deque(keys)
        self._expected = len(keys)
        self._done: dict[str, KVRecord | Miss] = {}
        self._changed = threading.Condition()

    def take(self) -> str | None:
        """The next key to read; None when there is none, or the caller has gone."""
        with self._changed:
            return self._todo.popleft() if self._todo else None

    def deposit(self, key: str, outcome: KVRecord | Miss) -> None:
        with self._changed:
            self._done[key] = outcome
            self._changed.notify()

    def collect(self, end: float) -> dict[str, KVRecord | Miss]:
        """Everything, or what is there at `end` of the monotonic clock; nothing more is begun after that."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._done) == self._expected, timeout=end - time.monotonic())
            self._todo.clear()
            return dict(self._done)


def _name(key: str) -> str:
    return f"kv/{key[:2]}/{key}"
