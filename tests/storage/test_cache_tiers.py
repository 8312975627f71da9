"""What every tier with a budget does."""

from __future__ import annotations

import dataclasses
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kv_samples import PROFILE, same
from tier_kit import COPIES, KEYS, RECORDS, SIZE, TIERS, always, bytes_on_disk

from storage.tiers.types import CacheTier, Copy
from storage.types import Miss


@pytest.fixture(params=sorted(TIERS))
def make(request: pytest.FixtureRequest, tmp_path: Path):
    """Makes the tier, with room for so many records."""
    return lambda room: TIERS[request.param](tmp_path, room)


def held(tier: CacheTier) -> set[int]:
    return {KEYS.index(key) for key in tier.held()}


def test_a_copy_comes_back_equal_and_is_counted(make) -> None:
    tier = make(4)
    assert tier.load(KEYS[0], PROFILE) is Miss.ABSENT
    assert tier.offer(COPIES[0], always)
    found = tier.load(KEYS[0], PROFILE)
    assert isinstance(found, Copy)
    assert same(found.record, RECORDS[0])
    counters = tier.counters()
    assert (counters["hits"], counters["misses"], counters["promotions"], counters["entries"]) == (1, 1, 1, 1)
    assert 0 < counters["bytes"] <= SIZE
    assert SIZE < counters["capacity_bytes"] <= 4 * SIZE


def test_what_is_there_is_not_taken_twice(make) -> None:
    tier = make(4)
    assert tier.offer(COPIES[0], always)
    before = tier.counters()["bytes"]
    assert not tier.offer(COPIES[0], always)
    assert tier.counters()["bytes"] == before


def test_the_least_worth_makes_room(make) -> None:
    tier = make(3)
    for number in (0, 1, 2):
        tier.offer(COPIES[number], always)
    tier.load(KEYS[0], PROFILE)
    tier.touch(KEYS[2])
    tier.offer(COPIES[3], always)
    assert held(tier) == {0, 2, 3}
    assert tier.counters()["evictions"] == 1
    assert tier.load(KEYS[1], PROFILE) is Miss.ABSENT


def test_what_is_larger_than_the_tier_is_declined(make) -> None:
    tier = make(0)
    assert not tier.offer(COPIES[0], always)
    assert tier.held() == {}
    assert tier.counters()["bytes"] == 0


def test_a_record_of_another_profile_is_not_served(make) -> None:
    tier = make(4)
    tier.offer(COPIES[0], always)
    assert isinstance(tier.load(KEYS[0], dataclasses.replace(PROFILE, weights="w-2")), Miss)


def test_what_was_overtaken_by_a_deletion_is_not_taken(make) -> None:
    tier = make(4)
    assert not tier.offer(COPIES[0], lambda: False)
    assert tier.held() == {}


def test_what_is_forgotten_is_gone_with_its_bytes(make) -> None:
    tier = make(4)
    for copy in COPIES[:3]:
        tier.offer(copy, always)
    tier.forget([KEYS[0], KEYS[2], KEYS[9], "../../etc/passwd"])
    assert held(tier) == {1}
    assert tier.load(KEYS[0], PROFILE) is Miss.ABSENT
    assert tier.counters()["bytes"] <= SIZE
    assert tier.offer(COPIES[0], always)


def test_pinned_copies_stay_and_a_pin_without_room_is_refused(make) -> None:
    tier = make(3)
    tier.offer(COPIES[0], always)
    tier.pin([KEYS[0], KEYS[1], KEYS[2], KEYS[3]])
    for number in (9, 10, 1, 11, 2, 12, 3):
        tier.offer(COPIES[number], always)
    assert held(tier) == {0, 1, 2}
    assert not tier.holds(KEYS[3])
    counters = tier.counters()
    assert counters["pins_refused"] == 1
    assert counters["pinned_bytes"] == counters["bytes"]
    tier.unpin([KEYS[1]])
    tier.offer(COPIES[13], always)
    assert held(tier) == {0, 2, 13}
    tier.forget([KEYS[0]])
    assert not tier.holds(KEYS[0])


def test_the_budget_holds_at_every_moment_under_eight_threads(make, tmp_path: Path) -> None:
    tier = make(5)
    room = tier.counters()["capacity_bytes"]
    seen, over, stop = set(), [], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            used = tier.counters()["bytes"]
            seen.add(used)
            if used > room:
                over.append(used)

    def hammer(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(250):
            number = choice.randrange(len(COPIES))
            found = tier.load(KEYS[number], PROFILE)
            if isinstance(found, Copy):
                assert same(found.record, RECORDS[number])
            else:
                tier.offer(COPIES[number], always)
            if choice.random() < 0.1:
                tier.forget([KEYS[choice.randrange(len(COPIES))]])
            if choice.random() < 0.05:
                tier.pin([KEYS[number]])
                tier.unpin([KEYS[number]])

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hammer, range(8)))
    stop.set()
    watcher.join()
    assert over == []
    assert len(seen) > 1, "something was measured"
    counters = tier.counters()
    assert counters["evictions"] > 50
    assert counters["damaged"] == counters["write_errors"] == counters["pinned_bytes"] == 0
    assert bytes_on_disk(tmp_path) in (0, counters["bytes"])
    tier.forget(KEYS)
    assert tier.counters()["bytes"] == bytes_on_disk(tmp_path) == 0


def test_records_that_memory_has_let_go_of_are_freed(tmp_path: Path) -> None:
    tier = TIERS["memory"](tmp_path, 3)
    alive: set[int] = set()
    for number, each in enumerate(RECORDS):
        kv = each.kv.clone()
        weakref.finalize(kv, alive.discard, number)
        alive.add(number)
        tier.offer(Copy(dataclasses.replace(each, kv=kv)), always)
        del kv
        assert len(alive) <= 5
    assert {KEYS.index(key) for key in tier.held()} == alive


def test_a_view_is_counted_as_all_that_it_keeps_alive(tmp_path: Path) -> None:
    tier = TIERS["memory"](tmp_path, 3)
    packed = RECORDS[0].kv.expand(8, *RECORDS[0].kv.shape).clone()
    assert not tier.offer(Copy(dataclasses.replace(RECORDS[0], kv=packed[0])), always)
    assert tier.counters()["promotions_declined"] == 1
