"""The disk tier: what it finds at its start, damaged copies, and processes side by side."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kv_samples import PROFILE, same
from tier_kit import (
    COPIES,
    ENVIRONMENT,
    KEYS,
    RECORDS,
    SIZE,
    always,
    bytes_on_disk,
    cached_file,
    home_of,
)

from storage.errors import StorageUnavailable
from storage.kvstore import KVStore
from storage.tiers import disk as disk_module
from storage.tiers.disk import DiskTier, empty_abandoned
from storage.tiers.store import object_name
from storage.tiers.types import Copy
from storage.types import Miss, ObjectStore


@pytest.fixture
def disk(tmp_path: Path):
    tier = DiskTier(tmp_path / "cache", 8 * SIZE)
    yield tier
    tier.close()


def again(disk: DiskTier, room: int = 8) -> DiskTier:
    """The tier of a process that starts after this one's has ended."""
    disk.close()
    return DiskTier(disk.folder.parent, room * SIZE)


# --- a start finds what was left ---


def test_a_new_process_finds_the_disk_warm(disk: DiskTier) -> None:
    for copy in COPIES[:3]:
        disk.offer(copy, always)
    before = disk.counters()
    after = again(disk)
    assert after.folder == disk.folder
    assert sorted(after.held()) == sorted(KEYS[:3])
    assert after.counters()["bytes"] == before["bytes"] == bytes_on_disk(disk.folder)
    found = after.load(KEYS[1], PROFILE)
    assert isinstance(found, Copy)
    assert same(found.record, RECORDS[1])
    after.close()


def test_leftovers_and_strangers_are_removed_and_not_counted(disk: DiskTier) -> None:
    disk.offer(COPIES[0], always)
    strangers = ["0123.writing", "ab/note.txt", f"{KEYS[1][:2]}/{KEYS[1]}", f"00/{'f' * 64}.12", f"{KEYS[2][:2]}/{KEYS[2]}.x"]
    for name in strangers:
        path = disk.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100)
    (disk.folder / KEYS[3][:2]).mkdir(exist_ok=True)
    (disk.folder / KEYS[3][:2] / f"{KEYS[3]}.9").touch()  # as a power cut leaves it
    after = again(disk)
    assert [*after.held()] == KEYS[:1]
    assert not [name for name in strangers if (disk.folder / name).exists()]
    assert after.counters()["bytes"] == bytes_on_disk(disk.folder)
    after.close()


def test_a_smaller_budget_holds_from_the_start(disk: DiskTier) -> None:
    for copy in COPIES[:8]:
        disk.offer(copy, always)
    after = again(disk, room=3)
    assert len([*after.held()]) == 3
    assert bytes_on_disk(disk.folder) == after.counters()["bytes"] == 3 * SIZE
    after.close()


def test_what_recomputing_costs_is_known_after_a_restart(disk: DiskTier) -> None:
    for copy in COPIES[:8]:  # all two blocks large, of 200 to 202 tokens
        disk.offer(copy, always)
    cheapest = min(range(8), key=lambda number: (len(RECORDS[number].token_ids), KEYS[number]))
    after = again(disk)
    after.offer(COPIES[8], always)
    assert KEYS[cheapest] not in [*after.held()]
    after.close()


def test_dates_of_files_mean_nothing(disk: DiskTier) -> None:
    for copy in COPIES[:8]:
        disk.offer(copy, always)
    for number, key in enumerate(KEYS[:8]):
        os.utime(cached_file(disk, key), times=[(0, 0), (4e9, 4e9)][number % 2])
    (disk.folder / "torn.writing").touch()
    os.utime(disk.folder / "torn.writing", times=(4e9, 4e9))
    after = again(disk)
    assert sorted(after.held()) == sorted(KEYS[:8])
    assert not (disk.folder / "torn.writing").exists()
    after.close()


def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageUnavailable):
        DiskTier(tmp_path / "file", SIZE)


# --- damage ---


def cached(objects: ObjectStore, disk: DiskTier, **more: object) -> KVStore:
    """A store whose first record is at home and on disk, and not in memory."""
    store = KVStore(objects, disk=disk, **more)  # type: ignore[arg-type]
    store.put(RECORDS[0])
    assert store.chain.flush(20)
    assert [*disk.held()] == KEYS[:1]
    return store


DAMAGES = {
    "flipped": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "truncated": lambda data: data[:-64],
    "extended": lambda data: data + bytes(64),
    "empty": lambda data: b"",
    "swapped": lambda data: b"".join(COPIES[1].encoded),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_copy_is_read_from_home_counted_and_repaired(objects, disk: DiskTier, damage) -> None:
    reported: list[str] = []
    store = cached(objects, disk, on_damage=lambda key, miss: reported.append(key))
    path = cached_file(disk, KEYS[0])
    good = path.read_bytes()
    path.write_bytes(damage(good))
    found = store.get_many(KEYS[:1], PROFILE, deadline_s=20)
    assert same(found[KEYS[0]], RECORDS[0])
    assert found.tiers == {KEYS[0]: "store"}
    assert disk.counters()["damaged"] == 1
    assert reported == [], "the object is well"
    assert store.chain.flush(20)
    assert cached_file(disk, KEYS[0]).read_bytes() == good
    assert store.get_many(KEYS[:1], PROFILE, deadline_s=20).tiers == {KEYS[0]: "disk"}
    assert store.counters()["hits"] == 2
    assert disk.counters()["bytes"] == bytes_on_disk(disk.folder)


def test_every_byte_of_a_cached_copy_is_verified(disk: DiskTier, tmp_path: Path) -> None:
    store = cached(home_of(tmp_path / "home", RECORDS[:1]), disk)
    good = cached_file(disk, KEYS[0]).read_bytes()
    for at in range(0, len(good), 7):
        path = cached_file(disk, KEYS[0])
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        assert same(store.get(KEYS[0], PROFILE), RECORDS[0]), at
        assert store.chain.flush(20)
    assert disk.counters()["damaged"] == len(range(0, len(good), 7))


def test_a_copy_taken_away_behind_our_back_is_read_from_home(disk: DiskTier, tmp_path: Path) -> None:
    store = cached(home_of(tmp_path / "home", RECORDS[:1]), disk)
    shutil.rmtree(disk.folder)
    assert same(store.get(KEYS[0], PROFILE), RECORDS[0])
    assert store.chain.flush(20)
    assert disk.counters()["bytes"] == 0
    assert disk.counters()["write_errors"] == 1, "there is no folder to write to"


def test_what_a_damaged_copy_says_is_not_said_of_the_object(disk: DiskTier, tmp_path: Path) -> None:
    home, reported = home_of(tmp_path / "home", RECORDS[:1]), []  # type: ignore[var-annotated]
    store = cached(home, disk, on_damage=lambda key, miss: reported.append(key))
    cached_file(disk, KEYS[0]).write_bytes(b"nonsense")
    home.delete(object_name(KEYS[0]))
    assert store.get(KEYS[0], PROFILE) is Miss.ABSENT
    assert reported == []


def test_damage_at_home_is_reported_even_with_a_disk(disk: DiskTier, tmp_path: Path) -> None:
    home, reported = home_of(tmp_path / "home", RECORDS[:2]), []  # type: ignore[var-annotated]
    home.put(object_name(KEYS[0]), [b"nonsense"])
    store = KVStore(home, disk=disk, on_damage=lambda key, miss: reported.append((key, miss)))
    assert store.get(KEYS[0], PROFILE) is Miss.DAMAGED
    assert reported == [(KEYS[0], Miss.DAMAGED)]
    assert store.chain.flush(20)
    assert [*disk.held()] == []


# --- processes side by side ---

HOLD = """
import sys
from storage.tiers.disk import DiskTier
disk = DiskTier(sys.argv[1], 1 << 20)
print(disk.folder.name, *disk.held(), flush=True)
sys.stdin.read()
"""


def hold(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(root)]
    return subprocess.Popen(command, text=True, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_two_processes_have_a_folder_each_and_a_killed_ones_is_taken_over(disk: DiskTier) -> None:
    disk.offer(COPIES[0], always)
    root = disk.folder.parent
    other = hold(root)
    assert other.stdout is not None
    assert other.stdout.readline().split() == ["1"], "not this process's folder, and nothing in it"
    other.send_signal(signal.SIGKILL)
    other.wait(10)
    disk.close()
    heir = hold(root)
    assert heir.stdout is not None
    assert heir.stdout.readline().split() == ["0", KEYS[0]]
    heir.kill()
    heir.wait(10)
    for process in (other, heir):
        process.communicate()


def test_folders_nobody_came_back_for_are_emptied_and_held_ones_are_not(disk: DiskTier, monkeypatch) -> None:
    root = disk.folder.parent
    disk.offer(COPIES[0], always)
    living, dead = DiskTier(root, 1 << 20), DiskTier(root, 1 << 20)
    for tier in (living, dead):
        tier.offer(COPIES[1], always)
    dead.close()
    disk.reclaim()
    assert bytes_on_disk(dead.folder) == SIZE, "it may yet come back"
    now = disk_module.time.monotonic()
    monkeypatch.setattr(disk_module.time, "monotonic", lambda: now + disk_module.ABANDONED_S + 1)
    disk.reclaim()
    assert bytes_on_disk(dead.folder) == 0
    assert bytes_on_disk(living.folder) == bytes_on_disk(disk.folder) == SIZE
    living.close()
    empty_abandoned(root)
    assert bytes_on_disk(root) == SIZE
    empty_abandoned(root / "nowhere")
