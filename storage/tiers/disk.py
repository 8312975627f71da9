"""Objects kept on a local disk, in front of a slower store.

Each process has a folder of its own, `<root>/<n>`, held by a lock that the system lets go of however the
process ends. So one process alone knows what lies there, and its budget needs no talk with others; who starts
again takes the same folder, and finds it warm. Nothing is synced: after a power cut a file may be any bytes,
which its reader finds out. No clock is asked but the monotonic one, and no file's date.

What is evicted while somebody reads it keeps its blocks until the read ends: beyond the budget there may be as
many files as there are readers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from storage.codecs import Codec
from storage.errors import StorageUnavailable
from storage.format import encode
from storage.tiers.ledger import Entry, Ledger
from storage.tiers.ledgered import Ledgered
from storage.tiers.types import COUNTS, Copy, Counts, Extent, Fresh, count_load, read_record
from storage.types import KVProfile, Miss

BLOCK = 4096  # files are counted in whole blocks, as the disk does
MAX_FOLDERS = 64
REST_S = 30.0  # no writes for so long after one has failed: a full disk is not asked again at once
ABANDONED_S = 600.0  # between looks for abandoned folders, from our start on: who starts with us may yet take its own
_FILE = re.compile(r"([0-9a-f]{64})\.(\d{1,9})(?:\.([a-z0-9]{1,20}))?")
_LOCK = "lock"


class DiskTier(Ledgered):
    """A CacheTier of files `<2 hex>/<key>.<tokens>`, written beside and renamed; `<key>.<tokens>.<codec>` where a copy is in
    another codec than the object at home, which the operator's rules must name (`keep_as`).

    Raises StorageUnavailable where the folder cannot be made or read.
    """

    name = "disk"

    def __init__(self, root: str | os.PathLike[str], capacity_bytes: int) -> None:
        self.counts = Counts(COUNTS)
        self._root = Path(root)
        self._ledger = Ledger(capacity_bytes)
        self._codecs: Mapping[str, str] | None = None  # by key; None: nobody has told us yet
        self._lock = threading.Lock()  # of the ledger: never held while the disk is waited for
        self._resting_until = time.monotonic()
        self._reclaim_at = self._resting_until + ABANDONED_S
        self._handle: int | None = None
        try:
            self.folder, self._handle = _own_folder(self._root)
            self._take_stock()
        except OSError as error:
            self.close()
            raise StorageUnavailable(f"disk tier: {error.strerror}") from error

    def close(self) -> None:
        """Let another process have the folder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def load(self, key: str, profile: KVProfile, codec: Codec | None = None) -> Copy | Miss:
        """See Tier."""
        with self._lock:
            entry = self._ledger.get(key)
            self._ledger.touch(key)
        found = Miss.ABSENT if entry is None or not self._is_meant(entry) else self._read(entry, profile, codec)
        count_load(self.counts, found)
        if entry is not None and not isinstance(found, Copy) and self._is_meant(entry):
            self.forget([key])
        return found

    def offer(self, copy: Copy, fresh: Fresh) -> bool:
        """See CacheTier. What is evicted for it leaves the disk before a byte of it is written."""
        copy = copy if self.holds(copy.record.key) else self._recoded(copy)
        entry = self._reserve(copy, fresh)
        if entry is None:
            return False
        written = self._write(entry, copy) if self._unlink(entry.victims) else 0
        if not written:
            with self._lock:
                self._ledger.cancel(entry)
            return False
        with self._lock:
            kept = self._ledger.settle(entry)
        self.counts.add(bytes_written=written, promotions=int(kept))
        if not kept:  # forgotten while it was being written
            self._unlink([entry])
        return kept

    def takes(self, key: str, extent: Extent) -> bool:
        """See CacheTier. A copy in a codec of its own is no larger than the object and its numbers together."""
        with self._lock:
            size = extent.object + (extent.record if key in (self._codecs or {}) else 0)
            return self._ledger.takes(key, _blocks(size))

    def forget(self, keys: Collection[str]) -> None:
        """See CacheTier."""
        with self._lock:
            removed = [self._ledger.remove(key) for key in keys]
        self._unlink([entry for entry in removed if entry is not None])

    def holds(self, key: str) -> bool:
        """See CacheTier."""
        with self._lock:
            entry = self._ledger.get(key)
        return entry is not None and self._is_meant(entry)

    def keep_as(self, codecs: Mapping[str, str]) -> set[str]:
        """Keep copies of these keys in these codecs of the table from now on, and all others in the object's own.

        Returns keys to be forgotten by all tiers: copies of them may have come through a codec that is not named any
        more. A copy in the object's own codec is right under any rule; it stays until it is evicted."""
        with self._lock:
            before, self._codecs = self._codecs or {}, dict(codecs)
            stale = {entry.key for entry in self._ledger.entries() if not self._is_meant(entry)}
        return stale | {key for key, codec in before.items() if codecs.get(key) != codec}

    def reclaim(self) -> None:
        """Call it now and then: empties the folders of processes that have ended and not come back."""
        if time.monotonic() >= self._reclaim_at:
            self._reclaim_at = time.monotonic() + ABANDONED_S
            empty_abandoned(self._root)

    # --- one file ---------------------------------------------------------------------------------------

    def _is_meant(self, entry: Entry) -> bool:
        """Whether the copy is in a codec in which it may be read. A warm one waits unread until the rules are known."""
        return not entry.codec or (self._codecs or {}).get(entry.key) == entry.codec

    def _recoded(self, copy: Copy) -> Copy:
        """The copy as it is to lie here. One whose numbers the codec cannot hold stays as it is."""
        record, name = copy.record, (self._codecs or {}).get(copy.record.key, "")
        if not name or name == record.profile.codec:
            return copy
        with contextlib.suppress(ValueError):
            record = replace(record, profile=replace(record.profile, codec=name))
            return Copy(copy.record, encode(record), name)
        return copy

    def _read(self, entry: Entry, profile: KVProfile, codec: Codec | None) -> Copy | Miss:
        if entry.codec:  # of the file's name: its header must say the same
            copy = self._read_as(entry, replace(profile, codec=entry.codec), None)
            return copy if isinstance(copy, Miss) else Copy(replace(copy.record, profile=profile), codec=entry.codec)
        return self._read_as(entry, profile, codec)

    def _read_as(self, entry: Entry, profile: KVProfile, codec: Codec | None) -> Copy | Miss:
        try:
            with open(self._path(entry), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                read_all = partial(_fill_all, file.fileno(), size)
                return read_record(read_all, self.counts, entry.key, profile, codec)
        except FileNotFoundError:  # evicted just now, or taken away behind our back
            return Miss.ABSENT
        except OSError:
            return Miss.UNAVAILABLE

    def _reserve(self, copy: Copy, fresh: Fresh) -> Entry | None:
        size = sum(map(len, copy.encoded))
        with self._lock:
            if not size or not fresh() or self._ledger.get(copy.record.key) is not None:
                return None
            entry = None
            if time.monotonic() >= self._resting_until:
                entry = self._ledger.reserve(copy.record.key, _blocks(size), len(copy.record.token_ids), copy.codec)
        if entry is None:
            self.counts.add(promotions_declined=1)
        return entry

    def _write(self, entry: Entry, copy: Copy) -> int:
        """The bytes written; 0 if that failed, and then writing rests."""
        path = self._path(entry)
        temp = self.folder / f"{uuid.uuid4().hex}.writing"
        try:
            with open(temp, "xb") as file:
                written = sum(file.write(part) for part in copy.encoded)
            path.parent.mkdir(exist_ok=True)
            os.replace(temp, path)
        except OSError:
            self.counts.add(write_errors=1)
            self._resting_until = time.monotonic() + REST_S
            with contextlib.suppress(OSError):
                os.unlink(temp)
            return 0
        return written

    def _unlink(self, entries: Collection[Entry]) -> bool:
        """Take files away; whether all went. One that will not go stays counted."""
        gone = True
        for entry in entries:
            try:
                os.unlink(self._path(entry))
            except FileNotFoundError:
                pass
            except OSError:
                self.counts.add(write_errors=1)
                gone = False
                continue
            with self._lock:
                self._ledger.release(entry)
        return gone

    def _path(self, entry: Entry) -> Path:
        suffix = f".{entry.codec}" if entry.codec else ""
        return self.folder / entry.key[:2] / f"{entry.key}.{entry.cost}{suffix}"

    def _take_stock(self) -> None:
        """Count what an earlier process left, remove its unfinished files and what is over the budget."""
        for path in sorted(_files(self.folder)):
            match, size = _FILE.fullmatch(path.name), path.stat().st_size
            entry = None
            if match and size and path.parent.name == match[1][:2]:
                entry = self._ledger.reserve(match[1], _blocks(size), int(match[2]), match[3] or "")
            if entry is None:
                os.unlink(path)
            else:
                self._unlink(entry.victims)
                self._ledger.settle(entry)


def empty_abandoned(root: Path) -> None:
    """Remove the files in folders that no process holds. Never raises."""
    with contextlib.suppress(OSError):
        for folder in sorted(root.iterdir()):
            if (handle := _try_lock(folder)) is not None:
                try:
                    for path in _files(folder):
                        os.unlink(path)
                finally:
                    os.close(handle)  # or the folder would be held for as long as this process lives


def _own_folder(root: Path) -> tuple[Path, int]:
    """The first folder that no living process holds, and the handle that holds it."""
    for number in range(MAX_FOLDERS):
        folder = root / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        if (handle := _try_lock(folder)) is not None:
            return folder, handle
    raise StorageUnavailable(f"disk tier: {MAX_FOLDERS} processes have their folders there already")


def _try_lock(folder: Path) -> int | None:
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _files(folder: Path) -> Iterator[Path]:
    """All files but the lock."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names if name != _LOCK)


def _fill_all(handle: int, size: int, allocate: Callable[[int], memoryview]) -> int:
    return _fill(handle, allocate(size))


def _fill(handle: int, view: memoryview) -> int:
    """Read to the end of the view or of the file; the bytes read."""
    done = 0
    while done < len(view) and (count := os.readv(handle, [view[done:]])):
        done += count
    return done
