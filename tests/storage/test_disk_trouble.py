"""A disk that is full, broken or slow: answers are right, budgets hold, and nobody waits."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from kv_samples import PROFILE
from tier_kit import (
    COPIES,
    KEYS,
    RECORDS,
    SIZE,
    always,
    bytes_on_disk,
    home_of,
    on_small_disk,
    run_script,
)

from storage.kvstore import KVStore
from storage.tiers import disk as disk_module
from storage.tiers.disk import DiskTier
from storage.types import KVRecord, Miss


@pytest.fixture
def disk(tmp_path: Path):
    tier = DiskTier(tmp_path / "cache", 8 * SIZE)
    yield tier
    tier.close()


FILL = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tier_kit import COPIES, KEYS, SIZE, always
from storage.tiers.disk import DiskTier

room = int(sys.argv[2]) * SIZE
disk = DiskTier(sys.argv[1], room)

def hammer(first):
    for number in range(300):
        disk.offer(COPIES[(first + 5 * number) % len(COPIES)], always)
        if number % 7 == 0:
            disk.forget([KEYS[(first + number) % len(COPIES)]])

with ThreadPoolExecutor(8) as pool:
    list(pool.map(hammer, range(8)))
print(json.dumps(disk.counters()))
"""


def test_a_disk_as_large_as_the_budget_is_never_too_small(tmp_path: Path) -> None:
    """The file system itself is the measure: one byte over the budget at any moment, and a write fails."""
    counters = json.loads(on_small_disk(tmp_path, 5 * SIZE >> 10, FILL, "5"))
    assert counters["write_errors"] == 0
    assert counters["promotions"] > 50
    assert counters["evictions"] > 20


FULL = """
import json, sys
from kv_samples import PROFILE, same
from tier_kit import KEYS, RECORDS, SIZE, home_of
from pathlib import Path
from storage.kvstore import KVStore
from storage.tiers.disk import DiskTier

disk = DiskTier(Path(sys.argv[1]) / "cache", 100 * SIZE)
store = KVStore(home_of(Path(sys.argv[2])), disk=disk)
for turn in range(2):
    for each in RECORDS:
        assert same(store.get(each.key, PROFILE), each)
        assert store.chain.flush(20)
left = sorted(path.name for path in Path(sys.argv[1]).rglob("*.writing"))
print(json.dumps({**disk.counters(), "left": left, "hits_disk": store.counters()["hits_disk"]}))
"""


def test_a_full_disk_is_not_written_to_again_at_once_and_answers_are_right(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    counters = json.loads(on_small_disk(mount, 5 * SIZE >> 10, FULL, str(tmp_path / "home")))
    assert counters["write_errors"] == 1
    assert counters["promotions"] == counters["entries"] == counters["hits_disk"] == 5
    assert counters["promotions_declined"] > 20
    assert counters["left"] == []
    assert counters["bytes"] == 5 * SIZE


LIMITED = """
import json, resource, signal, sys
from kv_samples import PROFILE, same
from tier_kit import RECORDS, SIZE, home_of
from pathlib import Path
from storage.kvstore import KVStore
from storage.tiers.disk import DiskTier

home, disk = home_of(Path(sys.argv[1]) / "home"), DiskTier(Path(sys.argv[1]) / "cache", 100 * SIZE)
store = KVStore(home, disk=disk)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # a copy breaks off in its middle
assert all(same(store.get(each.key, PROFILE), each) for each in RECORDS)
assert store.chain.flush(20)
print(json.dumps({**disk.counters(), "left": [path.name for path in disk.folder.rglob("*") if path.name != "lock"]}))
"""


def test_a_write_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    counters = json.loads(run_script(LIMITED, str(tmp_path)))
    assert counters["write_errors"] >= 1
    assert counters["bytes"] == counters["entries"] == counters["promotions"] == 0
    assert all(len(name) == 2 for name in counters["left"])  # folders


def test_writing_rests_after_an_error_and_goes_on_later(disk: DiskTier, monkeypatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(disk_module.time, "monotonic", lambda: now[0])
    with monkeypatch.context() as patch:
        patch.setattr(disk_module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert not disk.offer(COPIES[0], always)
    assert not disk.offer(COPIES[0], always)
    assert disk.counters()["promotions_declined"] == 1
    now[0] += disk_module.REST_S
    assert disk.offer(COPIES[0], always)
    assert disk.counters()["bytes"] == bytes_on_disk(disk.folder)


def test_what_cannot_be_removed_stays_counted(tmp_path: Path, monkeypatch) -> None:
    disk = DiskTier(tmp_path / "cache", 2 * SIZE)
    for copy in COPIES[:2]:
        disk.offer(copy, always)
    with monkeypatch.context() as patch:
        patch.setattr(disk_module.os, "unlink", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert not disk.offer(COPIES[2], always)
        disk.forget(KEYS[:2])
    assert bytes_on_disk(disk.folder) == 2 * SIZE
    assert [*disk.held()] == []
    assert not disk.offer(COPIES[2], always), "there is no room"
    assert bytes_on_disk(disk.folder) == 2 * SIZE
    disk.close()


@pytest.fixture
def stuck(monkeypatch):
    """The disk's renames wait for `go`; `waiting` is set once one does."""
    go, waiting, real = threading.Event(), threading.Event(), os.replace

    def replace(source: Path, target: Path) -> None:
        if source.suffix == ".writing":
            waiting.set()
            assert go.wait(20)
        real(source, target)

    monkeypatch.setattr(disk_module.os, "replace", replace)
    yield go, waiting
    go.set()


def test_no_reader_waits_for_a_disk_that_is_slow_to_write(disk: DiskTier, tmp_path: Path, stuck) -> None:
    go, waiting = stuck
    store = KVStore(home_of(tmp_path / "home"), memory_bytes=1 << 20, disk=disk)
    store.get(KEYS[0], PROFILE)
    assert waiting.wait(10)
    for _ in range(2):
        found = store.get_many(KEYS[:6], PROFILE, deadline_s=10)
        assert all(isinstance(each, KVRecord) for each in found.values())
    assert set(found.tiers.values()) == {"memory"}
    store.put(RECORDS[7])  # nor does a writer
    store.forget([KEYS[5]])
    assert [*disk.held()] == []
    go.set()
    assert store.chain.flush(20)
    assert disk.holds(KEYS[0])


def test_what_is_deleted_while_it_is_being_written_is_not_kept(disk: DiskTier, tmp_path: Path, stuck) -> None:
    go, waiting = stuck
    store = KVStore(home_of(tmp_path / "home"), disk=disk)
    store.get_many(KEYS[:3], PROFILE, deadline_s=10)
    assert waiting.wait(10)
    assert store.delete(KEYS[:3]) == set()
    go.set()
    assert store.chain.flush(20)
    assert [*disk.held()] == []
    assert disk.counters()["bytes"] == bytes_on_disk(disk.folder) == 0
    assert set(store.get_many(KEYS[:3], PROFILE, deadline_s=10).values()) == {Miss.ABSENT}
