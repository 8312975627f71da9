"""The tiers as one: one read for all who wait, copies that move up, deletions that reach every tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kv_samples import PROFILE, same
from tier_kit import KEYS, RECORDS, SIZE, extents, home_of

from storage.errors import StorageUnavailable
from storage.folder import FolderStore
from storage.kvstore import KVStore
from storage.tiers.disk import DiskTier
from storage.tiers.flights import MAX_READERS
from storage.tiers.mover import Mover
from storage.tiers.store import object_name
from storage.types import KVRecord, Miss


class Gate(FolderStore):
    """A home whose reads wait until they are let go; `reads` are those begun."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()
        self.begun = threading.Event()
        self.reads: list[str] = []
        self.fail: Callable[[], None] = lambda: None

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        self.reads.append(name)
        count = super().read_into(name, buffer, offset)
        self.begun.set()
        assert self.go.wait(20)
        self.fail()
        return count


@pytest.fixture
def gate(tmp_path: Path):
    home_of(tmp_path / "home")
    home = Gate(tmp_path / "home")
    yield home
    home.go.set()


@pytest.fixture
def disk(tmp_path: Path):
    tier = DiskTier(tmp_path / "cache", 64 * SIZE)
    yield tier
    tier.close()


def waiting(store: KVStore) -> int:
    """How many callers wait for a read to end."""
    return len(store._flights._changed._waiters)  # type: ignore[attr-defined]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# --- one read for all who wait ---


def test_sixteen_readers_of_one_cold_key_read_the_store_once(gate: Gate, disk: DiskTier) -> None:
    store = KVStore(gate, memory_bytes=1 << 20, disk=disk)

    def read(number: int) -> object:
        if number % 2:
            return store.get(KEYS[0], PROFILE)
        return store.get_many(KEYS[:1], PROFILE, deadline_s=20)[KEYS[0]]

    with ThreadPoolExecutor(16) as pool:
        reads = [pool.submit(read, number) for number in range(16)]
        until(lambda: waiting(store) >= 15)  # the sixteenth may read in its own thread
        gate.go.set()
        assert all(same(each.result(), RECORDS[0]) for each in reads)
    assert gate.reads == [object_name(KEYS[0])]
    counters = store.chain.counters()
    assert (counters["store"]["hits"], counters["disk"]["misses"]) == (1, 1)
    assert store.counters()["hits"] == 16


def test_a_waiter_with_a_short_deadline_leaves_and_the_read_goes_on(gate: Gate) -> None:
    store = KVStore(gate)
    with ThreadPoolExecutor(2) as pool:
        hasty = pool.submit(store.get_many, KEYS[:1], PROFILE, 0.05)  # it began the read
        assert gate.begun.wait(10)
        patient = pool.submit(store.get_many, KEYS[:1], PROFILE, 20)
        until(lambda: waiting(store) == 2 or hasty.done())
        assert hasty.result() == {KEYS[0]: Miss.TIMEOUT}
        assert not patient.done()
        gate.go.set()
        assert same(patient.result()[KEYS[0]], RECORDS[0])
    assert len(gate.reads) == 1


def test_who_joins_keeps_to_its_own_deadline(gate: Gate) -> None:
    store = KVStore(gate)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(store.get, KEYS[0], PROFILE)
        assert gate.begun.wait(10)
        begun = time.monotonic()
        assert store.get_many(KEYS[:1], PROFILE, 0.1) == {KEYS[0]: Miss.TIMEOUT}
        assert time.monotonic() - begun < 5
        gate.go.set()
        assert same(patient.result(), RECORDS[0])


@pytest.mark.parametrize(("error", "miss"), [(StorageUnavailable("x"), "unavailable"), (MemoryError("x"), "unavailable")])
def test_a_read_that_fails_fails_for_who_waited_and_for_nobody_else(gate: Gate, error: Exception, miss: str) -> None:
    store = KVStore(gate)

    def fail() -> None:
        if gate.reads[-1] == object_name(KEYS[0]):
            raise error

    gate.fail = fail
    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(store.get_many, KEYS[:1], PROFILE, 20) for _ in range(2)]
        until(lambda: waiting(store) == 2)
        gate.go.set()
        assert [each.result() for each in reads] == [{KEYS[0]: Miss(miss)}] * 2
    assert len(gate.reads) == 1
    assert same(store.get(KEYS[1], PROFILE), RECORDS[1])
    gate.fail = lambda: None
    assert same(store.get(KEYS[0], PROFILE), RECORDS[0])


def test_what_was_written_is_found_though_a_read_from_before_still_goes_on(gate: Gate) -> None:
    store, name = KVStore(gate), object_name(KEYS[0])
    gate.put(name, [b"damaged"])
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(store.get, KEYS[0], PROFILE)
        assert gate.begun.wait(10)
        store.put(RECORDS[0])
        late = threading.Thread(target=lambda: found.append(store.get(KEYS[0], PROFILE)))
        found: list[object] = []
        late.start()
        until(lambda: len(gate.reads) == 2)
        gate.go.set()
        late.join()
        assert same(found[0], RECORDS[0])
        assert early.result() is Miss.DAMAGED


def test_who_asks_after_a_deletion_does_not_join_a_read_from_before(gate: Gate) -> None:
    store = KVStore(gate, memory_bytes=1 << 20)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(store.get, KEYS[0], PROFILE)
        assert gate.begun.wait(10)
        assert store.delete(KEYS[:1]) == set()
        assert store.get_many(KEYS[:1], PROFILE, 10) == {KEYS[0]: Miss.ABSENT}
        gate.go.set()
        assert same(early.result(), RECORDS[0])
    assert store.get(KEYS[0], PROFILE) is Miss.ABSENT


def test_what_lies_on_disk_is_read_while_the_store_has_stalled(gate: Gate, disk: DiskTier) -> None:
    store = KVStore(gate, disk=disk)
    store.put(RECORDS[0])
    assert store.chain.flush(20)
    for turn in range(MAX_READERS // 4):
        keys = [f"{turn:02x}{number:062x}" for number in range(4)]
        for key in keys:
            gate.put(object_name(key), [b"x"])
        store.get_many(keys, PROFILE, 0.01)
    until(lambda: len(gate.reads) == MAX_READERS)
    assert store.get_many(KEYS[1:2], PROFILE, 0.1) == {KEYS[1]: Miss.TIMEOUT}
    assert len(gate.reads) == MAX_READERS, "no more threads wait for it"
    assert same(store.get_many(KEYS[:1], PROFILE, 10)[KEYS[0]], RECORDS[0])


def test_what_lies_on_disk_does_not_wait_behind_what_has_stalled(gate: Gate, disk: DiskTier) -> None:
    store = KVStore(gate, disk=disk)
    for record in RECORDS[:4]:
        store.put(record)
    assert store.chain.flush(20)
    stalled = [f"{number:064x}" for number in range(4)]
    for key in stalled:
        gate.put(object_name(key), [b"x"])
    found = store.get_many([*stalled, *KEYS[:4]], PROFILE, 2)
    assert [found[key] for key in stalled] == [Miss.TIMEOUT] * 4
    assert [same(found[key], record) for key, record in zip(KEYS, RECORDS[:4], strict=False)] == [True] * 4


# --- copies move up ---


def test_a_record_is_found_nearer_each_time_and_the_answer_says_where(gate: Gate, disk: DiskTier) -> None:
    gate.go.set()
    store = KVStore(gate, disk=disk)
    assert store.get_many(KEYS[:2], PROFILE, 20).tiers == dict.fromkeys(KEYS[:2], "store")
    assert store.chain.flush(20)
    assert store.get_many(KEYS[:3], PROFILE, 20).tiers == {KEYS[0]: "disk", KEYS[1]: "disk", KEYS[2]: "store"}
    store = KVStore(gate, memory_bytes=1 << 20, disk=disk)
    store.get_many(KEYS[:1], PROFILE, 20)
    assert store.get_many(KEYS[:1], PROFILE, 20).tiers == {KEYS[0]: "memory"}
    store = KVStore(gate, memory_bytes=1 << 20, device_bytes=1 << 20, disk=disk)
    store.get_many(KEYS[:1], PROFILE, 20)
    assert store.chain.flush(20)
    found = store.get_many(KEYS[:1], PROFILE, 20)
    assert found.tiers == {KEYS[0]: "device"}
    assert same(found[KEYS[0]], RECORDS[0])
    assert len(gate.reads) == 3
    assert [*store.chain.counters()] == ["device", "memory", "disk", "store"]
    assert store.counters()["hits_device"] == 1


def test_what_leaves_the_device_is_in_memory(gate: Gate) -> None:
    gate.go.set()
    store = KVStore(gate, memory_bytes=8 * SIZE, device_bytes=2 * SIZE)
    for key in KEYS[:2]:
        store.get(key, PROFILE)
    assert store.chain.flush(20)
    store.chain._memory.forget(KEYS[:2])
    store.get(KEYS[2], PROFILE)
    assert store.chain.flush(20)
    assert len(store.chain.keys("device")) == 2
    assert sorted({*store.chain.keys("device"), *store.chain.keys("memory")}) == sorted(KEYS[:3])
    store.delete(KEYS[:3])
    assert store.keys_in_memory() == []


def test_what_is_written_is_on_disk_and_not_yet_in_memory(gate: Gate, disk: DiskTier) -> None:
    store = KVStore(gate, memory_bytes=1 << 20, disk=disk)
    store.put(RECORDS[0])
    assert store.chain.flush(20)
    assert store.chain.keys("disk") == KEYS[:1]
    assert store.keys_in_memory() == []
    assert gate.reads == []


def test_what_is_in_use_in_memory_stays_on_a_full_disk(gate: Gate, tmp_path: Path) -> None:
    gate.go.set()
    disk = DiskTier(tmp_path / "small", 3 * SIZE)
    store = KVStore(gate, memory_bytes=2 * SIZE, disk=disk)
    store.get(KEYS[0], PROFILE)
    for number in range(1, 10):
        for _ in range(2):
            store.get(KEYS[0], PROFILE)
        store.get(KEYS[number], PROFILE)
        assert store.chain.flush(20)
    assert store.counters()["hits_memory"] == 18
    assert disk.holds(KEYS[0])
    assert disk.counters()["evictions"] == 7
    disk.close()


def test_copies_that_find_the_queue_full_are_dropped_and_counted(gate: Gate, disk: DiskTier, monkeypatch) -> None:
    gate.go.set()
    store = KVStore(gate, disk=disk)
    go = threading.Event()
    store.chain._mover = Mover("test", 2, 1 << 20)
    assert store.chain._mover.submit(lambda: go.wait(20))
    until(lambda: not store.chain._mover._jobs)
    found = store.get_many(KEYS[:6], PROFILE, 20)
    assert all(isinstance(each, KVRecord) for each in found.values())
    assert disk.counters()["promotions_dropped"] == 4
    go.set()
    assert store.chain.flush(20)
    assert disk.counters()["promotions"] == 2


def test_copies_that_wait_keep_a_bounded_part_of_memory_and_a_failed_move_stops_nothing(caplog) -> None:
    mover, go = Mover("test", 100, max_bytes=1000), threading.Event()
    assert mover.submit(lambda: go.wait(20), 600)
    assert not mover.submit(print, 500)
    assert mover.submit(lambda: 1 / 0, 400)
    go.set()
    assert mover.flush(20)
    assert "ZeroDivisionError" in caplog.text
    assert mover.submit(lambda: None, 1000)
    assert mover.flush(20)
    until(lambda: not any(each.name == "test" for each in threading.enumerate()))


# --- what policies do ---


def test_prefetch_fills_one_tier_with_verified_copies(gate: Gate, disk: DiskTier) -> None:
    gate.go.set()
    gate.put(object_name(KEYS[2]), [b"damaged"])
    store = KVStore(gate, memory_bytes=1 << 20, disk=disk)
    assert store.chain.prefetch("disk", extents(KEYS[:4]), PROFILE) == 4
    assert store.chain.flush(20)
    assert store.chain.keys("disk") == [KEYS[0], KEYS[1], KEYS[3]]
    assert store.keys_in_memory() == []
    reads = len(gate.reads)
    assert store.chain.prefetch("memory", extents(KEYS[:2]), PROFILE) == 2
    assert store.chain.prefetch("disk", extents(KEYS[:2]), PROFILE) == 2
    assert store.chain.flush(20)
    assert store.keys_in_memory() == KEYS[:2]
    assert len(gate.reads) == reads, "memory is filled from the disk, and the disk has them"
    assert store.counters()["hits"] == 0


def test_pins_and_unknown_tiers(gate: Gate, tmp_path: Path) -> None:
    gate.go.set()
    disk = DiskTier(tmp_path / "small", 3 * SIZE)
    store = KVStore(gate, disk=disk)
    store.chain.pin("disk", KEYS[:2])
    store.chain.prefetch("disk", extents(KEYS[:8]), PROFILE)
    assert store.chain.flush(20)
    assert {*KEYS[:2]} < {*store.chain.keys("disk")}
    store.chain.unpin("disk", KEYS[:2])
    for act in (store.chain.pin, store.chain.unpin):
        with pytest.raises(ValueError, match="no tier 'tape'"):
            act("tape", KEYS)
    with pytest.raises(ValueError, match="memory, disk"):
        store.chain.prefetch("store", extents(KEYS), PROFILE)
    disk.close()


# --- deletions ---


@pytest.mark.parametrize("way", ["delete", "forget"])
def test_a_deletion_reaches_every_tier(gate: Gate, disk: DiskTier, way: str) -> None:
    gate.go.set()
    store = KVStore(gate, memory_bytes=1 << 20, device_bytes=1 << 20, disk=disk)
    store.get_many(KEYS[:4], PROFILE, 20)
    assert store.chain.flush(20)
    if way == "forget":
        for key in KEYS[:2]:
            gate.delete(object_name(key))
    getattr(store, way)(KEYS[:2])
    for tier in ("device", "memory", "disk"):
        assert sorted(store.chain.keys(tier)) == sorted(KEYS[2:4]), tier
    assert store.get_many(KEYS[:2], PROFILE, 20) == dict.fromkeys(KEYS[:2], Miss.ABSENT)


def test_what_was_read_before_a_deletion_comes_back_in_no_tier(gate: Gate, disk: DiskTier) -> None:
    store = KVStore(gate, memory_bytes=1 << 20, device_bytes=1 << 20, disk=disk)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(store.get_many, KEYS[:3], PROFILE, 20)
        until(lambda: len(gate.reads) == 3)
        store.delete(KEYS[:3])
        gate.go.set()
        assert all(isinstance(each, KVRecord) for each in read.result().values())
    assert store.chain.flush(20)
    assert [store.chain.keys(tier) for tier in ("device", "memory", "disk")] == [[], [], []]


def test_readers_writers_and_deletions_at_once_leave_what_was_done_last(tmp_path: Path, disk: DiskTier) -> None:
    """Four tiers, eight threads, each with keys of its own; then every key is as its thread left it."""
    store = KVStore(home_of(tmp_path / "home"), memory_bytes=6 * SIZE, device_bytes=3 * SIZE, disk=disk)

    def work(number: int) -> dict[str, bool]:
        mine, there = RECORDS[number::8], {each.key: True for each in RECORDS[number::8]}
        for turn in range(40):
            each = mine[turn % len(mine)]
            if turn % 5 == 3:
                store.delete([each.key])
                there[each.key] = False
            elif turn % 5 == 4:
                store.put(each)
                there[each.key] = True
            found = store.get_many([each.key, KEYS[turn % 24]], PROFILE, 20)
            assert isinstance(found[each.key], KVRecord) is there[each.key], (turn, found[each.key])
        return there

    with ThreadPoolExecutor(8) as pool:
        ends = {key: there for each in pool.map(work, range(8)) for key, there in each.items()}
    assert store.chain.flush(20)
    for key, there in ends.items():
        assert isinstance(store.get(key, PROFILE), KVRecord) is there
    gone = {key for key, there in ends.items() if not there}
    assert not gone & {*store.keys_in_memory(), *store.chain.keys("disk")}


def test_sixteen_writers_of_one_key_leave_one_copy_in_each_tier(objects, disk: DiskTier) -> None:
    store = KVStore(objects, memory_bytes=1 << 20, disk=disk)
    with ThreadPoolExecutor(16) as pool:
        written = set(pool.map(lambda _: store.put(RECORDS[0]), range(16)))
    assert len(written) == 1
    assert store.chain.flush(20)
    assert list(objects.list("kv/")) == [object_name(KEYS[0])]
    assert disk.counters()["entries"] == 1
    assert disk.counters()["bytes"] == SIZE
    for tier in ("disk", "memory"):
        found = store.get_many(KEYS[:1], PROFILE, 20)
        assert found.tiers == {KEYS[0]: tier}
        assert same(found[KEYS[0]], RECORDS[0])
