"""What every object store does, whatever it stands on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.errors import ObjectMissing
from storage.names import is_name
from storage.types import ObjectStore

NAME = "kv/ab/" + "ab" * 32


def read(objects: ObjectStore, name: str, length: int, offset: int = 0) -> bytes:
    buffer = bytearray(length)
    return bytes(buffer[: objects.read_into(name, memoryview(buffer), offset)])


def test_it_is_an_object_store(objects):
    assert isinstance(objects, ObjectStore)


def test_parts_are_stored_joined(objects):
    assert objects.put(NAME, [b"one", memoryview(b"two"), b"", memoryview(bytearray(b"3"))]) == 7
    assert objects.size(NAME) == 7
    assert read(objects, NAME, 7) == b"onetwo3"


def test_an_object_of_several_megabytes_comes_back(objects):
    data = bytes(range(256)) * (5 << 12)
    assert objects.put(NAME, [data[:1000], memoryview(data)[1000:]]) == len(data)
    assert read(objects, NAME, len(data)) == data


class Memory:
    """What `read_all` asks memory of."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.data = bytearray()

    def __call__(self, size: int) -> memoryview:
        self.asked.append(size)
        self.data = bytearray(size)
        return memoryview(self.data)


@pytest.mark.parametrize("size", [0, 1, 5000, (1 << 20) - 1, 1 << 20, (33 << 20) + 7])
def test_an_object_is_read_whole_without_knowing_its_size(objects, size):
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    objects.put(NAME, [data])
    memory = Memory()
    assert objects.read_all(NAME, memory) == size
    assert memory.asked == [size]
    assert memory.data == data


def test_reading_whole_what_is_absent_asks_for_no_memory(objects):
    memory = Memory()
    with pytest.raises(ObjectMissing):
        objects.read_all(NAME, memory)
    assert memory.asked == []


def test_who_has_no_memory_for_an_object_says_so_in_its_own_words(objects):
    objects.put(NAME, [b"x" * 100])

    def refuse(size: int) -> memoryview:
        raise MemoryError(str(size))

    with pytest.raises(MemoryError, match="100"):
        objects.read_all(NAME, refuse)
    assert read(objects, NAME, 100) == b"x" * 100


def test_an_empty_object_is_an_object(objects):
    assert objects.put(NAME, []) == 0
    assert objects.size(NAME) == 0
    assert read(objects, NAME, 10) == b""
    assert read(objects, NAME, 0) == b""
    assert list(objects.list("")) == [NAME]


def test_reading_starts_at_the_offset_and_is_short_at_the_end(objects):
    data = b"0123456789"
    objects.put(NAME, [data])
    for offset, length in ((0, 4), (3, 4), (8, 4), (9, 1), (10, 4), (99, 4), (0, 99)):
        assert read(objects, NAME, length, offset) == data[offset : offset + length], (offset, length)


def test_reading_leaves_the_rest_of_the_buffer_alone(objects):
    objects.put(NAME, [b"0123456789"])
    buffer = bytearray(b"-" * 14)
    assert objects.read_into(NAME, memoryview(buffer)[2:6]) == 4
    assert objects.read_into(NAME, memoryview(buffer)[8:], offset=7) == 3
    assert buffer == b"--0123--789---"


def test_what_is_absent_is_said_to_be(objects):
    assert objects.size(NAME) is None
    assert objects.delete(NAME) is False
    assert list(objects.list("kv/")) == []
    for length in (5, 0):
        with pytest.raises(ObjectMissing):
            read(objects, NAME, length)


def test_a_later_put_replaces_all_of_an_earlier_one(objects):
    objects.put(NAME, [b"a long first object"])
    objects.put(NAME, [b"short"])
    assert objects.size(NAME) == 5
    assert read(objects, NAME, 99) == b"short"


def test_a_deleted_object_is_gone(objects):
    objects.put(NAME, [b"x"])
    objects.put(NAME + "0", [b"y"])
    assert objects.delete(NAME) is True
    assert objects.delete(NAME) is False
    assert objects.size(NAME) is None
    assert list(objects.list("")) == [NAME + "0"]


def test_a_name_may_also_be_the_beginning_of_others(objects):
    names = ["a", "a/b", "a/b/c", "a/b/cd", "a.b", "A", "a_b"]
    for name in names:
        objects.put(name, [name.encode()])
    assert sorted(objects.list("")) == sorted(names)
    assert all(read(objects, name, 99) == name.encode() for name in names)
    assert objects.delete("a/b")
    assert read(objects, "a/b/c", 99) == b"a/b/c"


def test_listing_finds_the_names_that_begin_with_the_prefix(objects):
    names = {"kv/aa/1", "kv/ab/2", "kv/ab/23", "raw/1"}
    for name in names:
        objects.put(name, [b"x"])
    for prefix in ("", "kv", "kv/", "kv/a", "kv/ab/", "kv/ab/2", "kv/ab/23", "nothing/here"):
        assert set(objects.list(prefix)) == {name for name in names if name.startswith(prefix)}, prefix


def test_more_than_a_thousand_names_are_listed_once_each(objects):
    names = {f"many/{number:04}" for number in range(1030)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: objects.put(name, [b"x"]), names))
    listed = list(objects.list("many/"))
    assert len(listed) == 1030
    assert set(listed) == names


def test_more_than_a_thousand_are_deleted_at_once_and_what_is_absent_is_no_error(objects):
    names = [f"many/{number:04}" for number in range(1030)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: objects.put(name, [b"x"]), names))
    objects.put("kept", [b"x"])
    assert objects.delete_many([*names, "never/there"]) == {}
    assert list(objects.list("")) == ["kept"]
    assert objects.delete_many([]) == {}


def test_entries_tell_size_and_age(objects):
    before = time.time()
    objects.put("a/one", [b"x" * 70])
    objects.put("a/two", [])
    objects.put("b", [b"y"])
    entries = {info.name: info for info in objects.entries("a/")}
    assert {name: info.size for name, info in entries.items()} == {"a/one": 70, "a/two": 0}
    for info in entries.values():
        assert before - 2 <= info.modified <= time.time() + 2, "S3 tells whole seconds"


def test_a_sweep_takes_nothing_that_is_whole(objects):
    objects.put("a", [b"x"])
    assert objects.sweep(0) == 0
    assert read(objects, "a", 1) == b"x"


def test_it_counts_in_whole_numbers(objects):
    objects.size("a")
    assert all(isinstance(count, int) for count in objects.counters().values())


BAD_NAMES = ["", "/", "/etc/passwd", "../up", "a/../b", "a/./b", "a//b", "a/", ".hidden", "a/.writing/b"]
BAD_NAMES += ["a\\b", "a b", "a\nb", "a\0b", "é", "a" * 200, "a/=5f/b", "C:/x", "a/" * 401 + "a", "a\n"]


def test_a_name_that_is_unsafe_somewhere_is_refused_everywhere(objects):
    refused = pytest.raises(ValueError, match="not an object name")
    for name in BAD_NAMES:
        assert not is_name(name), name
        with refused:
            objects.put(name, [b"x"])
        with refused:
            objects.size(name)
        with refused:
            objects.read_into(name, memoryview(bytearray(1)))
        with refused:
            objects.delete(name)
        with refused:
            objects.read_all(name, Memory())
        with refused:
            objects.delete_many(["good", name])
    assert list(objects.list("")) == []


def test_a_prefix_that_leads_elsewhere_is_refused(objects):
    for prefix in ("..", "../", "/", "a//", ".writing/"):
        with pytest.raises(ValueError, match="beginning of an object name"):
            list(objects.list(prefix))


def test_a_segment_of_199_bytes_is_still_a_name(objects):
    name = f"{'d' * 199}/{'x' * 199}"
    objects.put(name, [b"x"])
    assert list(objects.list("d")) == [name]


def test_readers_never_see_half_of_what_threads_write(objects):
    whole = {bytes([letter]) * 200_000 for letter in range(16)}
    objects.put(NAME, [next(iter(whole))])

    def write(data: bytes) -> bytes:
        objects.put(NAME, [data[:50_000], data[50_000:]])
        return read(objects, NAME, 300_000)

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(write, whole)) <= whole
    assert list(objects.list("")) == [NAME]


def test_of_all_who_store_a_new_object_at_once_one_is_first_and_its_bytes_stay(objects):
    def first(number: int) -> bool:
        return objects.put_new(NAME, [b"writer ", b"%02d" % number])

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(first, range(16)))
    assert won.count(True) == 1
    assert read(objects, NAME, 9) == b"writer %02d" % won.index(True)
    assert not objects.put_new(NAME, [b"later"])
    assert read(objects, NAME, 9) == b"writer %02d" % won.index(True)
    assert [*objects.list("")] == [NAME]
    objects.delete(NAME)
    assert objects.put_new(NAME, [b"again"])
    assert read(objects, NAME, 5) == b"again"
