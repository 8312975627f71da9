"""Bytes under a budget: what the medium holds is never more, in whatever order threads write and remove."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage.tiers.ledger import Entry, Ledger

CAPACITY = 100
KEYS = st.sampled_from([f"k{number}" for number in range(8)])


class Medium(RuleBasedStateMachine):
    """A tier whose steps happen one by one, interleaved in every way; `files` is what lies in its medium."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY)
        self.files: dict[int, int] = {}  # by entry
        self.writing: list[Entry] = []
        self.leaving: list[Entry] = []
        self.pinned: set[str] = set()

    @rule(key=KEYS, size=st.integers(1, 60), cost=st.integers(1, 9))
    def reserve(self, key: str, size: int, cost: int) -> None:
        entry = self.ledger.reserve(key, size, cost)
        if entry is not None:
            assert not {victim.key for victim in entry.victims} & self.pinned
            self.writing.append(entry)
            self.leaving += entry.victims

    @rule()
    def unlink(self) -> None:
        if self.leaving:
            entry = self.leaving.pop(0)
            del self.files[id(entry)]
            self.ledger.release(entry)

    @rule(number=st.integers(0, 5))
    def write(self, number: int) -> None:
        if number < len(self.writing) and not set(self.writing[number].victims) & set(self.leaving):
            entry = self.writing.pop(number)
            self.files[id(entry)] = entry.size
            if not self.ledger.settle(entry):
                self.leaving.append(entry)

    @rule(number=st.integers(0, 5))
    def fail(self, number: int) -> None:
        if number < len(self.writing) and not set(self.writing[number].victims) & set(self.leaving):
            self.ledger.cancel(self.writing.pop(number))

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        if (entry := self.ledger.remove(key)) is not None:
            self.leaving.append(entry)

    @rule(key=KEYS)
    def touch(self, key: str) -> None:
        self.ledger.touch(key)

    @rule(key=KEYS)
    def pin(self, key: str) -> None:
        self.ledger.pin([key])
        self.pinned.add(key)

    @rule(key=KEYS)
    def unpin(self, key: str) -> None:
        self.ledger.unpin([key])
        self.pinned.discard(key)

    @invariant()
    def never_over_the_budget(self) -> None:
        assert sum(self.files.values()) <= CAPACITY

    @invariant()
    def counted_right(self) -> None:
        counters = self.ledger.counters()
        held = self.ledger.entries()
        assert counters["bytes"] <= CAPACITY
        if not self.writing and not self.leaving:
            assert counters["bytes"] == sum(self.files.values())
        assert counters["pinned_bytes"] == sum(entry.size for entry in held if entry and entry.key in self.pinned)

    def teardown(self) -> None:
        """Once all is done, everything unpinned can be evicted for one that needs the room."""
        while self.leaving or self.writing:
            self.unlink()
            self.write(0)
        self.ledger.unpin(self.pinned)
        entry = self.ledger.reserve("large", CAPACITY, 1)
        assert entry is not None
        assert len(entry.victims) == len(self.files)


TestMedium = Medium.TestCase
TestMedium.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def filled(count: int, size: int) -> Ledger:
    ledger = Ledger(CAPACITY)
    for number in range(count):
        entry = ledger.reserve(f"k{number}", size, 1)
        assert entry is not None
        ledger.settle(entry)
    return ledger


def test_what_is_on_its_way_is_not_there_and_cannot_be_evicted() -> None:
    ledger = Ledger(CAPACITY)
    entry = ledger.reserve("a", 60, 1)
    assert entry is not None
    assert ledger.get("a") is None
    assert ledger.entries() == []
    assert ledger.reserve("a", 10, 1) is None
    assert ledger.reserve("b", 60, 1) is None
    assert ledger.settle(entry)
    assert ledger.get("a") is entry


def test_what_is_leaving_gives_no_room_to_others() -> None:
    ledger = filled(2, 50)
    small = ledger.reserve("small", 10, 1)
    assert small is not None
    assert [victim.key for victim in small.victims] == ["k0"]
    other = ledger.reserve("other", 40, 1)
    assert other is not None
    assert [victim.key for victim in other.victims] == ["k1"], "k0 may still lie there"
    assert ledger.reserve("third", 10, 1) is None
    for victim in (*small.victims, *other.victims):
        ledger.release(victim)
    assert ledger.reserve("third", 50, 1) is not None


def test_who_finds_no_room_evicts_nothing() -> None:
    ledger = filled(5, 20)
    ledger.pin(["k0"])
    assert ledger.reserve("large", 81, 1) is None
    assert len(ledger.entries()) == 5
    assert ledger.counters()["evictions"] == 0


def test_a_pin_that_finds_no_room_is_refused_and_counted() -> None:
    ledger = filled(5, 20)
    ledger.pin([f"k{number}" for number in range(5)])
    assert ledger.counters()["pinned_bytes"] == 100
    ledger.pin(["late"])
    assert ledger.reserve("late", 20, 1) is None
    assert ledger.reserve("unpinned", 20, 1) is None
    assert ledger.counters()["pins_refused"] == 1
    ledger.unpin(["k3"])
    entry = ledger.reserve("late", 20, 1)
    assert entry is not None
    assert [victim.key for victim in entry.victims] == ["k3"]
