"""Copies on disk in another codec than the object at home: as the operator's rules say, and no longer than they say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kv_samples import record, same, to_buffer
from tier_kit import cached_file, extents, home_of

from storage.codecs import CODECS
from storage.format import decode, encode, is_whole, profile_of
from storage.kvstore import KVStore
from storage.tiers.disk import BLOCK, DiskTier
from storage.tiers.store import object_name
from storage.tiers.types import Copy, Held
from storage.types import KVProfile, KVRecord, Miss

WIDE = KVProfile("m", "w", "t", "f", "filler:0:", "lossless", "bfloat16", layers=2, kv_heads=2, head_dim=32)
RECORDS = [record(tokens=120, profile=WIDE, seed=number) for number in range(6)]
KEYS = [each.key for each in RECORDS]
ROOM = 1 << 20
EXACT = {"raw", "lossless"}


def through(codec: str, original: KVRecord = RECORDS[0]) -> KVRecord:
    """The record with the numbers that a codec makes of it."""
    as_codec = replace(original, profile=replace(original.profile, codec=codec))
    found = decode(to_buffer(b"".join(encode(as_codec))), original.key, as_codec.profile)
    assert isinstance(found, KVRecord)
    return replace(found, profile=original.profile)


class House:
    """A home that holds all records, with memory and disk before it. `restart` as a new process on the same disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = home_of(folder / "home", RECORDS)
        self.damaged: list[str] = []
        self.restart()

    def restart(self) -> None:
        if hasattr(self, "disk"):
            self.disk.close()
        self.disk = DiskTier(self.folder / "cache", ROOM)
        self.store = KVStore(self.home, ROOM, lambda key, miss: self.damaged.append(key), disk=self.disk)

    def read(self, number: int = 0) -> KVRecord | Miss:
        found = self.store.get(KEYS[number], WIDE)
        assert self.store.chain.flush(20)
        return found

    def codec_on_disk(self, number: int = 0) -> str:
        """As the header of the copy has it."""
        data = cached_file(self.disk, KEYS[number]).read_bytes()
        assert is_whole(memoryview(data), KEYS[number])
        said = profile_of(memoryview(data))
        assert isinstance(said, KVProfile)
        assert replace(said, codec=WIDE.codec) == WIDE
        return said.codec

    def drop_memory(self) -> None:
        self.store.chain._memory.forget(KEYS)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.disk.close()


@pytest.mark.parametrize("codec", list(CODECS))
def test_a_copy_lies_on_disk_as_the_rule_says_and_is_read_from_there(house: House, codec: str) -> None:
    house.store.chain.keep_as({KEYS[0]: codec})
    assert same(house.read(), RECORDS[0]), "the first read is home's"
    assert house.codec_on_disk() == codec
    house.drop_memory()
    assert same(house.read(), through(codec)), "the second is the copy's, under the object's own profile"
    counters = house.store.chain.counters()
    assert (counters["store"]["hits"], counters["disk"]["hits"]) == (1, 1)
    assert same(through(codec), RECORDS[0]) == (codec in EXACT)


def test_what_memory_took_from_a_recoded_copy_says_so_and_what_it_took_from_home_does_not(house: House) -> None:
    house.store.chain.keep_as({KEYS[0]: "int8"})
    house.read()
    assert house.store.chain.held("memory")[KEYS[0]].codec == ""
    house.drop_memory()
    house.read()
    assert house.store.chain.held("memory")[KEYS[0]].codec == "int8"
    assert house.store.chain.held("disk")[KEYS[0]].codec == "int8"
    assert same(house.read(), through("int8")), "from memory now, the same numbers"


def test_a_copy_says_through_which_codec_it_came_wherever_it_moves(tmp_path: Path) -> None:
    with_disk = DiskTier(tmp_path / "cache", ROOM)
    store = KVStore(home_of(tmp_path / "home", RECORDS), ROOM, disk=with_disk, device_bytes=RECORDS[0].kv.nbytes)
    chain, device, memory = store.chain, store.chain._device, store.chain._memory
    assert device is not None

    def read(key: str) -> None:
        store.get(key, WIDE)
        assert chain.flush(20)

    chain.keep_as({KEYS[0]: "int8"})
    chain.prefetch("disk", extents(KEYS[:1]), WIDE)
    assert chain.flush(20)
    read(KEYS[0])
    assert chain.held("device")[KEYS[0]].codec == "int8", "from the disk"
    device.forget(KEYS)
    read(KEYS[0])
    assert chain.held("device")[KEYS[0]].codec == "int8", "from memory"
    memory.forget(KEYS)
    read(KEYS[1])
    assert chain.held("device").keys() == {KEYS[1]}
    assert chain.held("memory")[KEYS[0]].codec == "int8", "from the device, which had to make room"
    with_disk.close()


def test_budgets_and_views_count_the_bytes_of_the_copy(house: House) -> None:
    own, packed = (sum(map(len, encode(replace(r, profile=replace(WIDE, codec=c)))))
                   for r, c in ((RECORDS[0], "lossless"), (RECORDS[0], "int4")))  # fmt: skip
    house.store.chain.keep_as({KEYS[0]: "int4"})
    house.read(0)
    blocks = -(-packed // BLOCK) * BLOCK
    assert packed != own
    assert house.store.chain.held("disk") == {KEYS[0]: Held(blocks, "int4")}
    assert house.store.chain.counters()["disk"]["bytes"] == blocks
    assert cached_file(house.disk, KEYS[0]).stat().st_size == packed
    assert house.store.chain.counters()["disk"]["bytes_written"] == packed


def test_what_was_just_stored_goes_to_the_disk_as_the_rule_says(house: House) -> None:
    made = record(tokens=50, profile=WIDE, seed=77)
    house.store.chain.keep_as({made.key: "int8"})
    house.store.put(made)
    assert house.store.chain.flush(20)
    assert house.store.chain.held("disk")[made.key].codec == "int8"
    assert same(house.store.get(made.key, WIDE), through("int8", made))
    stored = bytearray(sum(map(len, encode(made))))
    house.home.read_into(object_name(made.key), memoryview(stored))
    assert stored == b"".join(encode(made)), "home has the object's own"


# --- when the rules change ---


def test_without_the_rule_its_copies_are_read_no_more_in_any_tier(house: House) -> None:
    house.store.chain.keep_as({KEYS[0]: "int8", KEYS[1]: "int8"})
    for number in (0, 1):
        house.read(number)
    house.drop_memory()
    for number in (0, 1):
        assert same(house.read(number), through("int8", RECORDS[number]))  # now in memory as well
    house.store.chain.keep_as({KEYS[1]: "int8"})
    assert same(house.read(0), RECORDS[0]), "home's bits again"
    assert same(house.read(1), through("int8", RECORDS[1])), "for the other nothing has changed"
    assert house.codec_on_disk(0) == "lossless"


def test_what_memory_took_from_a_copy_that_is_gone_by_now_goes_with_the_rule_too(house: House) -> None:
    house.store.chain.keep_as({KEYS[0]: "int8"})
    house.read()
    house.drop_memory()
    house.read()
    house.disk.forget(KEYS)  # as if it had been evicted
    house.store.chain.keep_as({})
    assert same(house.read(), RECORDS[0])


def test_another_codec_in_the_rule_replaces_the_copy(house: House) -> None:
    house.store.chain.keep_as({KEYS[0]: "int8"})
    house.read()
    house.store.chain.keep_as({KEYS[0]: "int4"})
    assert KEYS[0] not in house.store.chain.held("disk")
    assert same(house.read(), RECORDS[0])
    assert house.codec_on_disk() == "int4"


def test_a_copy_in_the_objects_own_codec_is_read_on_under_a_new_rule(house: House) -> None:
    house.read()
    house.store.chain.keep_as({KEYS[0]: "int8"})
    house.drop_memory()
    assert same(house.read(), RECORDS[0])
    assert house.store.chain.counters()["store"]["hits"] == 1, "it was not fetched again"


def test_a_read_that_began_under_the_old_rule_is_not_kept_under_the_new_one(house: House) -> None:
    house.store.chain.keep_as({KEYS[0]: "int8"})
    house.read()
    house.drop_memory()
    memory = house.store.chain._memory
    offer, told = memory.offer, []

    def offered_late(copy: Copy, fresh: object) -> bool:
        told.append(copy.codec)
        house.store.chain.keep_as({})  # between the read and the keeping
        return offer(copy, fresh)  # type: ignore[arg-type]

    memory.offer = offered_late  # type: ignore[method-assign]
    house.read()
    memory.offer = offer  # type: ignore[method-assign]
    assert told == ["int8"]
    assert KEYS[0] not in house.store.chain.held("memory")
    assert same(house.read(), RECORDS[0])


def test_after_a_restart_the_copies_are_warm_once_the_rules_are_known_and_unread_before(house: House) -> None:
    house.store.chain.keep_as({KEYS[0]: "int8", KEYS[1]: "int8"})
    for number in (0, 1):
        house.read(number)
    house.restart()
    assert not house.store.chain.is_near(KEYS[0])
    assert same(house.read(0), RECORDS[0]), "nobody has allowed the copy yet"
    house.store.chain.keep_as({KEYS[0]: "int8"})
    house.drop_memory()
    assert same(house.read(0), through("int8")), "it was not thrown away"
    assert set(house.store.chain.held("disk")) == {KEYS[0]}, "that of the other went with its rule"
    assert house.store.chain.counters()["disk"]["damaged"] == 0


# --- what is not believed ---


def test_an_object_at_home_in_another_codec_than_its_key_says_is_no_record(house: House) -> None:
    house.store.chain.keep_as({KEYS[0]: "int8"})
    foreign = replace(RECORDS[0], profile=replace(WIDE, codec="int8"))
    house.home.put(object_name(KEYS[0]), encode(foreign))
    assert house.read() is Miss.WRONG_LAYOUT
    assert house.store.chain.held("disk") == {}


@pytest.mark.parametrize("name", ["int4", "raw", "lossless"])
def test_a_copy_whose_header_is_not_of_the_codec_in_its_name_is_dropped(house: House, name: str) -> None:
    house.store.chain.keep_as({KEYS[0]: name})
    house.read()
    foreign = replace(RECORDS[0], profile=replace(WIDE, codec="int8"))
    cached_file(house.disk, KEYS[0]).write_bytes(b"".join(encode(foreign)))
    house.drop_memory()
    assert same(house.read(), RECORDS[0]), "home's"
    assert house.store.chain.counters()["store"]["hits"] == 2
    assert house.damaged == [], "a copy is not home"
    assert house.codec_on_disk() == name, "and a right copy took its place"


def test_every_byte_of_a_recoded_copy_is_verified(house: House) -> None:
    house.store.chain.keep_as({KEYS[0]: "int4"})
    house.read()
    data = cached_file(house.disk, KEYS[0]).read_bytes()
    for at in range(0, len(data), 97):
        broken = bytearray(data)
        broken[at] ^= 0x20
        cached_file(house.disk, KEYS[0]).write_bytes(broken)
        house.drop_memory()
        assert same(house.read(), RECORDS[0]), at


def test_numbers_that_the_codec_cannot_hold_are_kept_as_the_object_is(house: House) -> None:
    made = record(tokens=20, profile=WIDE, seed=88)
    made.kv[0, 0, 0, 0, 0] = float("nan")
    house.home.put(object_name(made.key), encode(made))
    house.store.chain.keep_as({made.key: "int8"})
    for _ in range(2):
        assert same(house.store.get(made.key, WIDE), made)
        assert house.store.chain.flush(20)
        house.store.chain._memory.forget([made.key])
    assert house.store.chain.held("disk")[made.key].codec == ""
    assert house.store.chain.counters()["disk"]["hits"] == 1
