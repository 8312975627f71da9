"""What a child keeps of its parent's objects stays within a budget, whoever reads; what it computed itself stays."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from api_kit import Site, running_site
from fixtures_work import paragraphs
from site_kit import PROFILE, Child, child_of, keys_of, object_name, parent_corpus, record, register, settle
from sqlalchemy import func, select

from ingest.site_sync import SiteSync
from storage.catalogue.kept import Kept
from storage.catalogue.schema import KeptObject, KVObject
from storage.errors import StorageUnavailable
from storage.format import encode
from storage.kvstore import KVStore
from storage.policy.parse import parse_policy
from storage.policy.source import PolicyError
from storage.readthrough import ReadThrough
from storage.types import KVRecord

MANY: dict[str, str | bytes] = {f"{n}.txt": paragraphs(4, tag=f"t{n}") for n in range(4)}
SIZE = sum(map(len, encode(record("0" * 64))))
ROOM = 5


class Budget:
    """Of so many objects."""

    objects: float = ROOM

    def __call__(self) -> int:
        return int(self.objects * SIZE)


@contextmanager
def edge(folder: Path) -> Iterator[tuple[Site, Child, Budget]]:
    """A child of all documents, in step, that has fetched nothing yet."""
    (folder / "parent").mkdir()
    with running_site(folder / "parent") as site:
        parent_corpus(site, "terms", MANY)
        budget = Budget()
        with child_of(site, folder / "child", register(site), budget=budget) as child:
            child.ingest(MANY)
            settle(child)
            assert len(keys_of(child.work)) > 2 * ROOM
            yield site, child, budget


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Site, Child, Budget]]:
    with edge(tmp_path) as found:
        yield found


def bytes_here(child: Child) -> int:
    return sum(info.size for info in child.local.entries("kv/"))


def test_the_budget_holds_while_many_readers_of_two_processes_fetch(made: tuple[Site, Child, Budget]) -> None:
    _, child, budget = made
    keys = keys_of(child.work)
    kept = Kept(child.work.catalogue, budget, child.kept._evict)
    other = KVStore(ReadThrough(child.local, child.peer, lambda key: True, kept))  # another process's view of the same store
    most, failures, ended = 0, list[str](), threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, bytes_here(child))
            time.sleep(0.002)

    def read(seed: int) -> None:
        order = random.Random(seed).sample(keys, len(keys))
        store = (child.store, other)[seed % 2]
        for key in order:  # a connection that the parent has closed for want of use is a miss, once
            if not any(isinstance(store.get(key, PROFILE), KVRecord) for _ in range(3)):
                failures.append(key)

    watching = threading.Thread(target=watch)
    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in (watching, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    ended.set()
    watching.join()
    assert failures == [], "what is not kept is fetched, and what leaves while it is read too"
    assert 0 < most <= budget()
    assert child.kept.counters() == {"objects": ROOM, "bytes": bytes_here(child), "capacity_bytes": budget()}


def test_what_answers_use_stays_and_a_scan_drives_out_itself(made: tuple[Site, Child, Budget]) -> None:
    _, child, _ = made
    hot, *scan = keys_of(child.work)
    child.read(hot)
    child.kept.used([hot] * 3)
    for key in scan:
        child.read(key)
    assert hot in child.here()
    with child.work.catalogue.read() as session:
        assert session.get_one(KeptObject, hot).uses == 4
    for _ in range(4):  # nobody uses it any more, and others are: in time it is overtaken
        for key in scan:
            child.read(key)
            child.kept.used([key])
    assert hot not in child.here()


def test_what_the_site_computed_itself_is_neither_counted_nor_evicted(made: tuple[Site, Child, Budget]) -> None:
    _, child, _ = made
    keys = keys_of(child.work)
    child.read(keys[0])
    own = keys[: ROOM + 2]  # more than the budget; the first one lay here as the parent's
    for key in own:
        child.store.put(record(key))
    assert child.kept.counters()["bytes"] == 0
    for key in keys:
        child.read(key)
    assert set(own) <= child.here()
    assert len(child.here()) == len(own) + min(ROOM, len(keys) - len(own))


def test_replication_fills_the_room_and_fetches_nothing_again(made: tuple[Site, Child, Budget]) -> None:
    site, child, _ = made
    with site.http() as http:
        http.post(f"/v1/sites/{child.key.site_id}/push").raise_for_status()
    for _ in range(4):
        child.sync.replicate(60)
    assert len(child.here()) == ROOM
    assert child.objects.counters()["objects"] == ROOM, "each once, though the order stands"


def test_a_smaller_budget_is_come_back_to_and_an_object_beyond_it_is_only_used(made: tuple[Site, Child, Budget]) -> None:
    _, child, budget = made
    keys = keys_of(child.work)
    for key in keys[:ROOM]:
        child.read(key)
    budget.objects = 2
    child.kept.trim()
    assert len(child.here()) == 2
    budget.objects = 0.5
    child.kept.trim()
    assert isinstance(child.read(keys[-1]), KVRecord)
    assert child.here() == set()
    assert child.objects.counters()["unkept"] == 1


def test_a_store_that_will_not_delete_costs_the_copy_and_who_died_evicting_leaves_it_to_the_next(
    made: tuple[Site, Child, Budget], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, child, budget = made
    keys = keys_of(child.work)
    for key in keys[:ROOM]:
        child.read(key)
    evict = child.kept._evict

    def away(_: object) -> list[str]:
        raise StorageUnavailable("the store is away")

    child.kept._evict = away  # type: ignore[assignment]
    assert isinstance(child.read(keys[ROOM]), KVRecord)
    assert child.here() == set(keys[:ROOM]), "nothing has left, and nothing has come beyond the budget"
    child.kept._evict = lambda keys: keys  # each by itself refused
    assert isinstance(child.read(keys[ROOM]), KVRecord)
    assert bytes_here(child) == budget()
    child.kept._evict = evict
    child.kept.trim()
    assert len(child.here()) == ROOM - 1, "what was about to leave has left"
    child.read(keys[ROOM])
    assert len(child.here()) == ROOM


def test_what_is_evicted_while_it_is_being_written_does_not_stay_uncounted(made: tuple[Site, Child, Budget]) -> None:
    _, child, budget = made
    key, write = keys_of(child.work)[0], child.local.put

    def slow(name: str, parts: object) -> int:
        budget.objects = 0
        child.kept.trim()  # another process, in between
        return write(name, parts)  # type: ignore[arg-type]

    child.local.put = slow  # type: ignore[method-assign]
    assert isinstance(child.read(key), KVRecord)
    assert child.here() == set()


def test_deletions_and_a_fresh_comparison_give_their_room_back(made: tuple[Site, Child, Budget]) -> None:
    site, child, _ = made
    keys = keys_of(child.work)
    for key in keys[:ROOM]:
        child.read(key)
    child.store.delete(keys[:2])
    with child.work.catalogue.write() as session:
        for key in keys[:2]:
            session.delete(session.get_one(KVObject, key))
    assert child.kept.counters()["objects"] == ROOM - 2
    with site.parts.catalogue.write() as session:  # the parent has lost one meanwhile
        session.get_one(KVObject, keys[2]).status = "failed"
    site.parts.objects.delete(object_name(keys[2]))
    fresh = SiteSync(child.work.catalogue, child.peer, child.key, child.store.delete, child.objects.pull, 30, 5)
    fresh._note(cursor=None)
    assert fresh.step()
    assert keys[2] not in child.here()
    with child.work.catalogue.read() as session:
        assert session.scalar(select(func.count()).select_from(KeptObject)) == ROOM - 3


def test_the_budget_is_said_in_the_policy_file() -> None:
    assert parse_policy(b"site: {budget: 1.5TB}\n").kept_bytes == 1_500_000_000_000
    assert parse_policy(b"rules: []\n").kept_bytes is None
    for wrong, mistake in ((b"site: {budget: lots}\n", "is no size"), (b"site: {bugdet: 1GB}\n", "did you mean 'budget'")):
        with pytest.raises(PolicyError, match=mistake):
            parse_policy(wrong)
