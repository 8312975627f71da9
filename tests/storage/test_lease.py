"""The safety of stored KV at a site that may be cut off at any time."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import record as make_record

from storage.folder import FolderStore
from storage.lease import Lease, LeasedKVStore
from storage.types import KVRecord, Miss

LEASE, EXCHANGE = 30.0, 5.0


@dataclasses.dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Exchanges:
    """What the catalogue counts, and what looks have forgotten."""

    def __init__(self) -> None:
        self.count = 7
        self.forgotten = 0

    def look(self, lease: Lease) -> None:
        lease.look(lambda: self.count, self.forget)

    def forget(self) -> None:
        self.forgotten += 1


def test_nothing_is_used_before_the_first_exchange_that_this_process_sees() -> None:
    clock, link = Clock(), Exchanges()
    lease = Lease(LEASE, EXCHANGE, clock)
    assert not lease.held()
    link.look(lease)
    assert not lease.held(), "the count may be from last week"
    clock.now += 1
    link.look(lease)
    assert not lease.held(), "nothing has happened since"
    link.count += 1
    link.look(lease)
    assert lease.held()


def test_it_ends_by_itself_and_comes_back_with_an_exchange() -> None:
    clock, link = Clock(), Exchanges()
    lease = Lease(LEASE, EXCHANGE, clock)
    link.look(lease)
    link.count += 1
    link.look(lease)
    clock.now += LEASE - EXCHANGE - 0.01
    assert lease.held()
    clock.now += 0.02
    assert not lease.held()
    link.look(lease)
    assert not lease.held()
    link.count += 1
    link.look(lease)
    assert lease.held()


def test_memory_is_cleared_of_what_was_deleted_before_the_lease_is_renewed() -> None:
    clock, link = Clock(), Exchanges()
    lease = Lease(LEASE, EXCHANGE, clock)
    link.look(lease)
    link.count += 1
    held: list[bool] = []
    lease.look(lambda: link.count, lambda: held.append(lease.held()))
    assert held == [False]
    assert lease.held()


steps = st.lists(
    st.tuples(st.sampled_from(["delete", "begin", "end", "look", "use"]), st.floats(0, 12)), min_size=5, max_size=60
)


@settings(max_examples=400)
@given(steps)
def test_what_was_deleted_at_the_parent_is_never_used_a_lease_later(events: list[tuple[str, float]]) -> None:
    """Deletions, exchanges, looks and questions in any order and at any time: what is used was not deleted at the parent a
    lease ago, unless this process has forgotten it."""
    clock = Clock()
    lease = Lease(LEASE, EXCHANGE, clock)
    deleted: list[float] = []  # at the parent
    known = forgotten = count = 0  # of those, erased in this site's catalogue; in this process
    begun: tuple[float, int] | None = None

    for event, pause in events:
        clock.now += pause
        if event == "delete":
            deleted.append(clock.now)
        elif event == "begin":
            begun = clock.now, len(deleted)  # what the parent answers
        elif event == "end" and begun is not None:
            known = max(known, begun[1])
            count += clock.now - begun[0] <= EXCHANGE
            begun = None
        elif event == "look":
            seen, forgets = count, known
            lease.look(lambda seen=seen: seen, lambda: None)  # type: ignore[misc]
            forgotten = max(forgotten, forgets)
        elif lease.held():
            assert all(at > clock.now - LEASE for at in deleted[forgotten:])


def test_a_store_without_a_lease_gives_nothing_and_takes_everything(tmp_path: object) -> None:
    clock, link = Clock(), Exchanges()
    lease = Lease(LEASE, EXCHANGE, clock)
    store = LeasedKVStore(FolderStore(str(tmp_path)), 1 << 20, lease=lease)
    record = make_record()
    store.put(record)
    assert store.get(record.key, record.profile) is Miss.UNSYNCED
    link.look(lease)
    link.count += 1
    link.look(lease)
    assert isinstance(store.get(record.key, record.profile), KVRecord)
    assert store.keys_in_memory() == [record.key]
    clock.now += LEASE
    assert store.get(record.key, record.profile) is Miss.UNSYNCED, "not from memory either"
    assert store.get_many([record.key], record.profile, 1.0) == {record.key: Miss.UNSYNCED}
