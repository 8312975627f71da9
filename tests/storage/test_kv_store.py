"""KVStore: records in, records or reasons out, whatever happens to the objects meanwhile."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kv_samples import PROFILE, record, same

from storage.errors import StorageTimeout, StorageUnavailable
from storage.folder import FolderStore
from storage.format import encode
from storage.kvstore import KVStore
from storage.tiers.flights import MAX_READERS
from storage.tiers.types import MAX_OBJECT_BYTES
from storage.types import KVRecord, Miss

RECORDS = [record(seed=number) for number in range(8)]
KEYS = [each.key for each in RECORDS]


def name(key: str) -> str:
    return f"kv/{key[:2]}/{key}"


class Watched(FolderStore):
    """A folder of objects; `before(name)` runs ahead of every read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: Callable[[str], None] = lambda name: None
        self.reads: list[str] = []

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        self.reads.append(name)
        self.before(name)
        return super().read_into(name, buffer, offset)


@pytest.fixture
def folder(tmp_path: Path) -> Watched:
    """An object store that holds RECORDS."""
    objects = Watched(tmp_path)
    for each in RECORDS:
        objects.put(name(each.key), encode(each))
    return objects


# --- both kinds of object store ---


def test_a_record_comes_back_equal_and_is_counted(objects):
    store = KVStore(objects)
    size = store.put(RECORDS[0])
    assert list(objects.list("kv/")) == [name(KEYS[0])]
    assert size == objects.size(name(KEYS[0]))
    assert same(store.get(KEYS[0], PROFILE), RECORDS[0])
    assert store.get(KEYS[1], PROFILE) is Miss.ABSENT
    counters = store.counters()
    assert (counters["hits"], counters["miss_absent"], counters["puts"]) == (1, 1, 1)
    assert counters["bytes_read"] == counters["bytes_written"] == size


def test_many_records_come_back_together_each_with_its_own_outcome(objects):
    store = KVStore(objects)
    for each in RECORDS[:6]:
        store.put(each)
    objects.put(name(KEYS[5]), [b"".join(encode(RECORDS[4]))])
    found = store.get_many([*KEYS, KEYS[0]], PROFILE, deadline_s=20)
    assert list(found) == KEYS
    assert all(same(found[each.key], each) for each in RECORDS[:5])
    assert [found[key] for key in KEYS[5:]] == [Miss.WRONG_KEY, Miss.ABSENT, Miss.ABSENT]
    assert store.counters()["hits"] == 5


def test_damage_is_counted_reported_and_repaired_in_place(objects):
    reported: list[tuple[str, Miss]] = []
    store = KVStore(objects, on_damage=lambda key, miss: reported.append((key, miss)))
    store.put(RECORDS[0])
    good = b"".join(encode(RECORDS[0]))
    flipped = good[:-40] + bytes([good[-40] ^ 1]) + good[-39:]
    other = b"".join(encode(RECORDS[1]))
    wrongs = {flipped: Miss.DAMAGED, good[:-1]: Miss.DAMAGED, b"": Miss.DAMAGED, other: Miss.WRONG_KEY}
    for data, miss in wrongs.items():
        objects.put(name(KEYS[0]), [data])
        assert store.get(KEYS[0], PROFILE) is miss
        assert reported.pop() == (KEYS[0], miss)
        store.put(RECORDS[0])
        assert same(store.get(KEYS[0], PROFILE), RECORDS[0])
    assert reported == []
    assert (store.counters()["miss_damaged"], store.counters()["miss_wrong_key"]) == (3, 1)


def test_a_deleted_record_is_absent_and_counted(objects):
    store = KVStore(objects, memory_bytes=1 << 20)
    store.put(RECORDS[0])
    assert same(store.get(KEYS[0], PROFILE), RECORDS[0])
    assert store.delete([KEYS[0], "../../etc/passwd"]) == set()
    assert store.get(KEYS[0], PROFILE) is Miss.ABSENT
    assert store.counters()["deletes"] == 1
    assert store.counters()["memory_bytes"] == 0


def test_an_object_deleted_behind_our_back_is_absent(objects):
    store = KVStore(objects)
    store.put(RECORDS[0])
    assert objects.delete(name(KEYS[0]))
    assert store.get(KEYS[0], PROFILE) is Miss.ABSENT
    assert store.get_many(KEYS[:1], PROFILE, deadline_s=20) == {KEYS[0]: Miss.ABSENT}


# --- odd requests ---


@pytest.mark.parametrize("key", ["", "ab", KEYS[0].upper(), KEYS[0] + "\n", "../" + KEYS[0][3:], "é" * 64])
def test_a_key_that_is_none_is_absent_and_cannot_be_written(folder, key):
    store = KVStore(folder)
    assert store.get(key, PROFILE) is Miss.ABSENT
    with pytest.raises(ValueError, match="hex"):
        store.put(dataclasses.replace(RECORDS[0], key=key))


def test_another_profile_is_a_wrong_layout_from_the_store_and_from_memory(folder):
    store = KVStore(folder, memory_bytes=1 << 20)
    other = dataclasses.replace(PROFILE, weights="w-2")
    assert store.get(KEYS[0], other) is Miss.WRONG_LAYOUT
    assert same(store.get(KEYS[0], PROFILE), RECORDS[0])
    assert store.get(KEYS[0], other) is Miss.WRONG_LAYOUT
    assert store.counters()["miss_wrong_layout"] == 2


def test_asking_for_nothing_is_answered_with_nothing(folder):
    assert KVStore(folder).get_many([], PROFILE, deadline_s=1) == {}


def test_an_object_of_absurd_size_is_damage_and_not_allocated(folder, monkeypatch):
    monkeypatch.setattr(folder, "size", lambda name: MAX_OBJECT_BYTES + 1)
    assert KVStore(folder).get(KEYS[0], PROFILE) is Miss.DAMAGED
    assert folder.reads == []


def test_an_object_that_shrinks_while_it_is_read_is_damage(folder):
    folder.before = lambda name: FolderStore.put(folder, name, [b"".join(encode(RECORDS[0]))[:-64]])
    assert KVStore(folder).get(KEYS[0], PROFILE) is Miss.DAMAGED


def test_a_read_that_says_it_was_short_is_damage_whatever_the_buffer_holds(folder, monkeypatch):
    read_into = folder.read_into
    monkeypatch.setattr(folder, "read_into", lambda name, buffer: read_into(name, buffer) - 1)
    assert KVStore(folder).get(KEYS[0], PROFILE) is Miss.DAMAGED


# --- memory ---


def test_what_was_read_is_served_from_memory_the_second_time(folder):
    store = KVStore(folder, memory_bytes=1 << 20)
    first, second = store.get(KEYS[0], PROFILE), store.get_many(KEYS[:2], PROFILE, deadline_s=20)
    assert second[KEYS[0]] is first
    assert len(folder.reads) == 2
    assert store.counters()["hits_memory"] == 1
    assert store.counters()["hits"] == 3


def test_memory_holds_no_more_than_its_bytes_and_drops_what_was_used_least_recently(folder):
    size = folder.size(name(KEYS[0]))
    store = KVStore(folder, memory_bytes=2 * size + 1)
    for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[2]):
        store.get(key, PROFILE)
        assert store.counters()["memory_bytes"] <= 2 * size + 1
    folder.reads.clear()
    for key in (KEYS[0], KEYS[2], KEYS[1]):
        store.get(key, PROFILE)
    assert folder.reads == [name(KEYS[1])]


def test_without_memory_everything_is_read_from_the_store(folder):
    store = KVStore(folder)
    store.get(KEYS[0], PROFILE)
    store.get(KEYS[0], PROFILE)
    assert len(folder.reads) == 2


def test_what_is_forgotten_is_read_again(folder):
    store = KVStore(folder, memory_bytes=1 << 20)
    store.get_many(KEYS[:2], PROFILE, deadline_s=20)
    FolderStore.delete(folder, name(KEYS[0]))
    store.forget([KEYS[0]])
    assert store.get(KEYS[0], PROFILE) is Miss.ABSENT
    assert same(store.get(KEYS[1], PROFILE), RECORDS[1])
    assert store.counters()["hits_memory"] == 1


@pytest.mark.parametrize("way", ["delete", "forget"])
def test_a_reader_overtaken_by_a_deletion_does_not_bring_the_record_back(folder, way):
    store = KVStore(folder, memory_bytes=1 << 20)
    reading, go_on = threading.Event(), threading.Event()
    real = FolderStore.read_into

    def read_then_dawdle(name: str, buffer: memoryview, offset: int = 0) -> int:
        count = real(folder, name, buffer, offset)
        reading.set()
        go_on.wait(10)
        return count

    folder.read_into = read_then_dawdle
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(store.get, KEYS[0], PROFILE)
        assert reading.wait(10)
        getattr(store, way)([KEYS[0]])
        go_on.set()
        assert same(read.result(), RECORDS[0])
    assert store.counters()["memory_bytes"] == 0


def test_a_deletion_that_fails_forgets_all_the_same(folder, monkeypatch):
    store = KVStore(folder, memory_bytes=1 << 20)
    store.get(KEYS[0], PROFILE)

    def fail(names: Sequence[str]) -> dict[str, str]:
        raise StorageUnavailable("no")

    monkeypatch.setattr(folder, "delete_many", fail)
    with pytest.raises(StorageUnavailable):
        store.delete([KEYS[0]])
    assert store.counters()["memory_bytes"] == 0
    assert store.counters()["deletes"] == 0


def test_what_the_store_will_not_delete_is_named_and_the_others_go(folder, monkeypatch):
    store, real = KVStore(folder, memory_bytes=1 << 20), folder.delete
    for key in KEYS[:3]:
        store.get(key, PROFILE)

    def refuse(name: str) -> bool:
        if KEYS[1] in name:
            raise StorageUnavailable("AccessDenied")
        return real(name)

    monkeypatch.setattr(folder, "delete", refuse)
    assert store.delete(KEYS[:3]) == {KEYS[1]}
    assert store.counters()["deletes"] == 2
    assert store.counters()["memory_bytes"] == 0, "it is wanted no more, wherever it lies"
    assert [key for key in KEYS[:3] if folder.size(name(key))] == [KEYS[1]]
    monkeypatch.undo()
    assert store.delete([KEYS[1]]) == set()


# --- stores that stall or fail ---


@pytest.mark.parametrize(
    ("error", "miss"), [(StorageUnavailable("x"), Miss.UNAVAILABLE), (StorageTimeout("x"), Miss.TIMEOUT)]
)
def test_a_store_that_raises_is_a_miss(folder, error, miss):
    def fail(name: str) -> None:
        raise error

    folder.before = fail
    store = KVStore(folder)
    assert store.get(KEYS[0], PROFILE) is miss
    assert store.get_many(KEYS, PROFILE, deadline_s=20) == dict.fromkeys(KEYS, miss)
    assert store.counters()[f"miss_{miss}"] == 9


def test_one_stalled_object_times_out_while_the_others_arrive(folder):
    release = threading.Event()
    folder.before = lambda asked: release.wait(20) and None if asked == name(KEYS[2]) else None
    store = KVStore(folder, memory_bytes=1 << 20)
    begun = time.monotonic()
    found = store.get_many(KEYS, PROFILE, deadline_s=0.5)
    assert 0.4 < time.monotonic() - begun < 5
    assert found.pop(KEYS[2]) is Miss.TIMEOUT
    assert all(isinstance(each, KVRecord) for each in found.values())
    assert (store.counters()["hits"], store.counters()["miss_timeout"]) == (7, 1)
    release.set()


def test_after_the_deadline_nothing_more_is_begun(folder):
    release = threading.Event()
    folder.before = lambda asked: release.wait(20) and None
    assert set(KVStore(folder).get_many(KEYS, PROFILE, deadline_s=0.1).values()) == {Miss.TIMEOUT}
    release.set()
    time.sleep(0.2)
    assert len(folder.reads) == 4


def test_threads_held_by_a_dead_store_are_bounded_and_given_back(folder):
    release = threading.Event()
    folder.before = lambda asked: release.wait(20) and None
    store = KVStore(folder)
    for _ in range(MAX_READERS // 4 + 4):
        assert set(store.get_many(KEYS, PROFILE, deadline_s=0.01).values()) == {Miss.TIMEOUT}
    assert sum(thread.name == "kv-reader" for thread in threading.enumerate()) <= MAX_READERS
    assert len(folder.reads) <= MAX_READERS
    release.set()
    found = store.get_many(KEYS, PROFILE, deadline_s=20)
    assert all(same(found[each.key], each) for each in RECORDS)


def test_counters_add_up_under_many_threads(folder):
    store = KVStore(folder, memory_bytes=3000)
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda number: store.get(KEYS[number % 8], PROFILE), range(800)))
    assert all(same(outcome, RECORDS[number % 8]) for number, outcome in enumerate(outcomes))
    counters = store.counters()
    assert counters["hits"] == 800
    assert counters["hits_memory"] + counters["hits_store"] == 800
    assert store.chain.counters()["store"]["hits"] == len(folder.reads) <= counters["hits_store"]
    assert counters["bytes_read"] == len(folder.reads) * folder.size(name(KEYS[0]))


def test_ten_objects_of_nine_megabytes_are_read_at_memory_speed(tmp_path):
    profile = dataclasses.replace(PROFILE, layers=30, kv_heads=3, head_dim=64)
    store = KVStore(FolderStore(tmp_path))
    first = record(tokens=400, profile=profile)
    written = [dataclasses.replace(first, key=f"{number:064x}") for number in range(10)]
    assert all(store.put(each) > 9_000_000 for each in written)
    keys = [each.key for each in written]
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        found = store.get_many(keys, profile, deadline_s=20)
        times.append(time.perf_counter() - begun)
    assert all(same(found[each.key], each) for each in written)
    assert min(times) < 0.1, times
