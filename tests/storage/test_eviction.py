"""Which entry goes first."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from storage.tiers.eviction import GDSF


def gdsf(**entries: tuple[int, int]) -> GDSF:
    """An order over entries given as name=(size, cost)."""
    order = GDSF()
    for key, (size, cost) in entries.items():
        order.insert(key, size, cost)
    return order


def drained(order: GDSF) -> list[str]:
    keys = []
    while (key := order.pop()) is not None:
        keys.append(key)
    return keys


def test_what_is_cheapest_for_its_bytes_goes_first() -> None:
    assert drained(gdsf(dear=(100, 90), cheap=(100, 10), large=(1000, 50), small=(10, 50))) == [
        "large", "cheap", "dear", "small",
    ]  # fmt: skip


def test_of_equals_the_one_asked_for_longest_ago_goes_first() -> None:
    assert drained(gdsf(a=(1, 1), b=(1, 1), c=(1, 1))) == ["a", "b", "c"]
    order = gdsf(a=(1, 1), b=(1, 1))
    order.touch("b")
    order.touch("a")
    assert drained(order) == ["b", "a"]


def test_use_outweighs_price() -> None:
    order = gdsf(often=(100, 10), dear=(100, 25))
    order.touch("often")
    order.touch("often")
    assert drained(order) == ["dear", "often"]


def test_what_is_no_longer_asked_for_is_overtaken_in_time() -> None:
    order = gdsf(once_hot=(1, 1))
    for _ in range(9):
        order.touch("once_hot")
    for number in range(12):
        order.insert(f"new{number}", 1, 1)
        if order.pop() == "once_hot":
            break
    else:
        raise AssertionError("it stays for ever")
    assert number >= 8


def test_a_scan_drives_out_its_own_entries_and_not_what_is_in_use() -> None:
    order, hot = GDSF(), {f"hot{number}" for number in range(10)}
    for key in sorted(hot):
        order.insert(key, 1, 1)
        for _ in range(5):
            order.touch(key)
    for number in range(40):  # four times what the tier holds
        order.insert(f"scan{number}", 1, 1)
        if number >= 10:
            assert order.pop() not in hot


def test_what_comes_back_is_known_by_its_use() -> None:
    order = gdsf(known=(1, 1))
    for _ in range(3):
        order.touch("known")
    order.remove("known")
    order.insert("stranger", 1, 2)
    order.insert("known", 1, 1)
    assert drained(order) == ["stranger", "known"]


def test_an_entry_that_was_removed_does_not_come_up() -> None:
    order = gdsf(a=(1, 1), b=(1, 1))
    order.touch("a")
    order.remove("a")
    order.remove("never there")
    order.touch("never there")
    assert drained(order) == ["b"]
    assert order.pop() is None


def test_void_places_and_the_past_are_bounded() -> None:
    order = GDSF()
    for number in range(50):
        order.insert(str(number), 1, 1)
    for number in range(20_000):
        order.touch(str(number % 50))
        order.insert("passing" + str(number), 1, 1)
        order.remove("passing" + str(number))
    assert len(order._heap) <= 2 * 51 + 64
    assert len(order._past) <= 1025


class Plain:
    """The rule as the paper has it, looking at every entry; with frequencies that are never forgotten."""

    def __init__(self) -> None:
        self.floor, self.clock = 0.0, 0
        self.values: dict[str, tuple[float, int]] = {}
        self.weight: dict[str, float] = {}
        self.frequency: dict[str, int] = {}

    def insert(self, key: str, size: int, cost: float) -> None:
        self.weight[key] = cost / size
        self.values[key] = (0, 0)
        self.touch(key)

    def touch(self, key: str) -> None:
        if key in self.values:
            self.frequency[key] = self.frequency.get(key, 0) + 1
            self.clock += 1
            self.values[key] = (self.floor + self.frequency[key] * self.weight[key], self.clock)

    def remove(self, key: str) -> None:
        self.values.pop(key, None)

    def pop(self) -> str | None:
        if not self.values:
            return None
        key = min(self.values, key=lambda each: self.values[each])
        self.floor = self.values.pop(key)[0]
        return key


steps = st.lists(st.tuples(st.sampled_from(["insert", "touch", "touch", "remove", "pop"]), st.integers(0, 12)), max_size=120)


@given(steps)
def test_it_does_what_the_paper_says(steps: list[tuple[str, int]]) -> None:
    order, plain = GDSF(), Plain()
    for step, number in steps:
        key = str(number)
        if step == "pop":
            assert order.pop() == plain.pop()
        elif step == "insert":
            if key not in plain.values:
                order.insert(key, number + 1, 7 * number % 5 + 1)
                plain.insert(key, number + 1, 7 * number % 5 + 1)
        else:
            getattr(order, step)(key)
            getattr(plain, step)(key)
    assert drained(order) == list(iter(plain.pop, None))


def test_the_same_requests_evict_the_same_whatever_the_time() -> None:
    def run() -> list[str | None]:
        order, choice, out = GDSF(), random.Random(3), []
        for number in range(3000):
            order.insert(str(number), choice.randrange(1, 50), choice.randrange(1, 50))
            order.touch(str(choice.randrange(number + 1)))
            if number > 100:
                out.append(order.pop())
        return out

    assert run() == run()
