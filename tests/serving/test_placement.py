"""Rules at work in the memory of the process that answers: pins, holds after use, fetches at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import torch
from fixtures_work import make_work
from sqlalchemy import select

from serving.placement import PASS_SECONDS, Placement
from storage.catalogue.schema import ChunkRow, Document, DocumentUse, KVObject
from storage.folder import FolderStore
from storage.format import encode
from storage.kvstore import KVStore
from storage.policy.file import PolicyFile
from storage.tier_control import ChainControl
from storage.tiers.disk import BLOCK, DiskTier
from storage.tiers.types import Extent
from storage.types import KVProfile, KVRecord

PROFILE = KVProfile("m", "w", "t", "f", "filler:0:", "raw", "float32", layers=1, kv_heads=1, head_dim=16)
OBJECT = sum(map(len, encode(KVRecord("0" * 64, PROFILE, (1, 2, 3, 4), torch.zeros(1, 2, 1, 4, 16)))))  # bytes of each


class Counting(FolderStore):
    """A home that notes what is read of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        self.read.append(name)
        return super().read_into(name, buffer, offset)


class House:
    """A catalogue with documents of one chunk each, their KV in a folder, and a process with little memory."""

    def __init__(self, folder: Path, disk: DiskTier | None = None) -> None:
        self.work = make_work(folder)
        self.path = folder / "policy.yaml"
        self.path.write_text("")
        self.now, self.ticks = time.time(), 0.0
        self.objects = Counting(folder / "kv")
        self.store = KVStore(self.objects, memory_bytes=5 * OBJECT, disk=disk)
        self.policy = PolicyFile(self.path, self._later)
        self.tiers = ChainControl(self.store.chain, lambda keys: {PROFILE: dict.fromkeys(keys, Extent(OBJECT, OBJECT))})
        self.placement = Placement(self.work.catalogue, self.policy, self.tiers, lambda: self.now)

    def _later(self) -> float:
        self.ticks += 1
        return self.ticks

    def add(self, corpus: str, *paths: str) -> None:
        """Documents whose KV is stored."""
        self.work.ingest(self.work.corpus(corpus), {path: f"{path} one two three" for path in paths})
        with self.work.catalogue.write() as session:
            for key, ids in session.execute(select(ChunkRow.kv_key, ChunkRow.token_ids)):
                tokens = tuple(range(len(ids) // 4))
                self.store.put(KVRecord(key, PROFILE, tokens, torch.zeros(1, 2, 1, len(tokens), 16)))
                session.get_one(KVObject, key).status = "done"

    def says(self, rules: str) -> None:
        self.path.write_text(rules)
        self.placement.tick()

    def pass_over(self) -> None:
        self.now += PASS_SECONDS
        self.placement.tick()

    def key(self, path: str) -> str:
        query = select(ChunkRow.kv_key).join(Document, Document.id == ChunkRow.document_id).where(Document.path == path)
        with self.work.catalogue.read() as session:
            return str(session.scalars(query).one())

    def document(self, path: str) -> str:
        with self.work.catalogue.read() as session:
            return session.scalars(select(Document.id).where(Document.path == path)).one()

    def in_memory(self) -> set[str]:
        """Paths of the documents whose KV lies in memory, once all that was asked for has come."""
        assert self.store.chain.flush(20)
        held = self.store.keys_in_memory()
        query = select(Document.path).join(ChunkRow, ChunkRow.document_id == Document.id).where(ChunkRow.kv_key.in_(held))
        with self.work.catalogue.read() as session:
            return set(session.scalars(query))

    def flood(self) -> None:
        """Read everything that is not pinned, in the order of its age."""
        with self.work.catalogue.read() as session:
            keys = list(session.scalars(select(ChunkRow.kv_key).order_by(ChunkRow.id)))
        for key in keys:
            if key not in self.placement.pinned("memory"):
                self.store.get(str(key), PROFILE)

    def use(self, path: str) -> None:
        self.store.get(self.key(path), PROFILE)
        self.placement.used({self.key(path): self.document(path)})


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.work.catalogue.close()


MANY = [f"other/{n}.txt" for n in range(8)]


def test_what_a_rule_pins_is_there_before_anybody_asks_and_stays(house: House) -> None:
    house.add("c", "hot/a.txt", "hot/b.txt", *MANY)
    house.says('rules:\n- {name: hot, match: {path: "hot/*"}, pin: memory}\n')
    assert house.in_memory() == {"hot/a.txt", "hot/b.txt"}
    for _ in range(3):
        house.flood()
    assert {"hot/a.txt", "hot/b.txt"} < house.in_memory(), "others come and go beside them"
    house.says("")
    house.flood()
    assert not {"hot/a.txt", "hot/b.txt"} & house.in_memory(), "nobody pins them any more"


def test_a_pin_reaches_documents_that_come_later_and_leaves_those_that_go(house: House) -> None:
    house.says('rules:\n- {match: {path: "hot/*"}, pin: memory}\n')
    assert house.in_memory() == set()
    house.add("c", "hot/a.txt", *MANY)
    house.pass_over()
    assert house.in_memory() == {"hot/a.txt"}
    house.work.deleter.document("t1", house.document("hot/a.txt"))
    house.pass_over()
    assert house.placement.pinned("memory") == frozenset()


def test_what_was_not_stored_yet_is_pinned_once_it_is(house: House) -> None:
    house.says("rules:\n- {pin: memory}\n")
    house.work.ingest(house.work.corpus("c"), {"a.txt": "owed, not stored"})
    house.pass_over()
    assert house.placement.pinned("memory") == frozenset()
    house.add("d", "b.txt")
    house.pass_over()
    assert house.in_memory() == {"a.txt", "b.txt"}


def test_more_pins_than_room_keep_what_fits_and_the_budget(house: House) -> None:
    house.add("c", *MANY)
    house.says("rules:\n- {pin: memory}\n")
    assert len(house.in_memory()) == 5
    assert house.store.counters()["memory_bytes"] <= 5 * OBJECT
    house.pass_over()
    assert house.store.counters()["memory_bytes"] <= 5 * OBJECT


def three_passes(house: House, rules: str) -> list[int]:
    """How often the home was read by each of three looks at the rules."""
    counts = []
    for act in (lambda: house.says(rules), house.pass_over, house.pass_over):
        before = len(house.objects.read)
        act()
        assert house.store.chain.flush(20)
        counts.append(len(house.objects.read) - before)
    return counts


def test_pins_that_do_not_fit_are_not_read_from_home_at_every_look(house: House) -> None:
    house.add("c", *MANY)
    assert three_passes(house, "rules:\n- {pin: memory}\n") == [5, 0, 0], "what fits, once; the other three never"
    assert len(house.tiers.refused("memory")) == 3
    counted = house.store.chain.counters()["memory"]
    assert (counted["pins_without_room"], counted["pins_refused"]) == (3, 3), "each once, and not at every look"
    house.says('rules:\n- {match: {path: "other/[0-4]*"}, pin: memory}\n')
    assert house.in_memory() == {f"other/{number}.txt" for number in range(5)}, "there is room for them now"
    assert house.tiers.refused("memory") == set()


def test_a_pin_that_turned_out_larger_than_it_was_said_to_be_is_read_once(house: House) -> None:
    house.add("c", *MANY)
    house.store.chain._memory._ledger.capacity += OBJECT // 2  # room for one more, if it were as small as is said
    house.tiers._by_profile = lambda keys: {PROFILE: dict.fromkeys(keys, Extent(1, 1))}
    assert three_passes(house, "rules:\n- {pin: memory}\n") == [8, 0, 0]
    assert len(house.tiers.refused("memory")) == 3


def test_a_tier_without_a_budget_is_asked_for_nothing(tmp_path: Path) -> None:
    store = KVStore(FolderStore(tmp_path))
    tiers = ChainControl(store.chain, lambda keys: pytest.fail("nothing is to be read"))
    assert tiers.tiers == ()
    tiers.pin("memory", {"0" * 64})
    assert tiers.prefetch("memory", {"0" * 64}) == 0


def test_what_was_used_is_kept_for_as_long_as_its_rule_says(house: House) -> None:
    house.add("c", "a.txt", "b.txt", *MANY)
    house.says('rules:\n- {match: {path: "a.txt"}, keep: {for: 2h}}\n')
    house.use("a.txt")
    house.use("b.txt")
    house.placement.tick()
    house.flood()
    assert "a.txt" in house.in_memory()
    assert "b.txt" not in house.in_memory(), "no rule keeps it"
    house.now += 7100
    house.use("a.txt")
    house.placement.tick()
    house.now += 7100
    house.placement.tick()
    house.flood()
    assert "a.txt" in house.in_memory(), "its time began anew with the second use"
    house.now += 200
    house.placement.tick()
    house.flood()
    assert "a.txt" not in house.in_memory()


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()


def test_a_time_fetches_what_its_rule_matches_once(house: House) -> None:
    house.add("c", "morning/a.txt", "b.txt")
    house.now = at("2026-11-27 18:00")  # a Friday
    house.says('rules:\n- {match: {path: "morning/*"}, prefetch: every working day at 07:45 Europe/Berlin}\n')
    for moment in ("2026-11-28 07:45", "2026-11-30 07:44"):
        house.now = at(moment)
        house.placement.tick()
        assert house.in_memory() == set(), moment
    house.now = at("2026-11-30 07:45") + 1
    house.placement.tick()
    assert house.in_memory() == {"morning/a.txt"}
    house.store.forget(house.store.keys_in_memory())
    house.now += 60
    house.placement.tick()
    assert house.in_memory() == set(), "one morning fires once"
    house.now = at("2026-12-01 07:45")
    house.placement.tick()
    assert house.in_memory() == {"morning/a.txt"}


def test_a_changed_time_counts_from_the_change_and_an_unchanged_one_is_not_lost(house: House) -> None:
    house.add("c", "a.txt")
    house.now = at("2026-11-30 07:00")
    house.says("rules:\n- {name: x, prefetch: every day at 07:45 Europe/Berlin}\n")
    house.now = at("2026-11-30 07:46")
    house.says("rules:\n- {name: y, prefetch: every day at 07:45 Europe/Berlin}\n")
    assert house.in_memory() == {"a.txt"}, "a new version one minute late still owes what the old one promised"
    house.store.forget(house.store.keys_in_memory())
    house.says("rules:\n- {name: y, prefetch: every day at 07:30 Europe/Berlin}\n")
    house.now += 60
    house.placement.tick()
    assert house.in_memory() == set(), "07:30 has passed today"


def test_a_fetch_ends_where_the_room_does(house: House) -> None:
    house.add("c", *MANY)
    house.now = at("2026-11-30 07:00")
    house.says("rules:\n- {prefetch: every day at 07:45 Europe/Berlin}\n")
    house.now = at("2026-11-30 07:45")
    house.placement.tick()
    assert house.store.counters()["memory_bytes"] <= 5 * OBJECT
    assert len(house.in_memory()) == 5


def test_use_makes_a_document_hot(house: House) -> None:
    house.add("c", "a.txt", "b.txt")
    house.says('rules:\n- {match: {use: {hits: ">= 5", days: 7}}, pin: memory}\n')
    assert house.in_memory() == set()
    with house.work.catalogue.write() as session:
        day = int(house.now // 86400)
        session.add(DocumentUse(document_id=house.document("a.txt"), day=day, hits=5, last_at=house.now))
    house.pass_over()
    assert house.in_memory() == {"a.txt"}


def test_a_tier_that_the_process_has_not_is_passed_over(house: House) -> None:
    house.add("c", "a.txt")
    house.says("rules:\n- {pin: disk, keep: {tier: disk, for: 1h}}\n")
    house.use("a.txt")
    house.pass_over()
    assert house.placement.told()["vs_t1_c"]["pin"] == {"rule-1": 1}
    assert house.placement.pinned("memory") == frozenset()
    assert house.placement.pinned("disk") == frozenset()


def test_a_store_that_is_away_delays_a_pin_and_does_not_lose_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    from storage.errors import StorageUnavailable

    house.add("c", "a.txt")
    with monkeypatch.context() as away:
        away.setattr(FolderStore, "size", lambda self, name: (_ for _ in ()).throw(StorageUnavailable("away")))
        house.says("rules:\n- {pin: memory}\n")
        assert house.in_memory() == set()
    house.pass_over()
    assert house.in_memory() == {"a.txt"}


def test_only_corpora_that_a_rule_may_reach_are_looked_at(house: House) -> None:
    house.add("c", "a.txt")
    house.add("d", "b.txt")
    house.says("rules:\n- {name: x, match: {corpus: d}, pin: memory}\n")
    assert set(house.placement.told()) == {"vs_t1_d"}
    assert house.in_memory() == {"b.txt"}


# --- codecs of copies on disk ---


@pytest.fixture
def disked(tmp_path: Path) -> Iterator[House]:
    disk = DiskTier(tmp_path / "cache", 1 << 20)
    made = House(tmp_path, disk)
    yield made
    made.work.catalogue.close()
    disk.close()


def on_disk(house: House) -> dict[str, str]:
    """Path → codec through which the copy on disk has come; none if it is the object's own."""
    assert house.store.chain.flush(20)
    codecs = {key: held.codec for key, held in house.store.chain.held("disk").items()}
    query = select(Document.path, ChunkRow.kv_key).join(ChunkRow, ChunkRow.document_id == Document.id)
    with house.work.catalogue.read() as session:
        return {path: codecs[str(key)] for path, key in session.execute(query) if key in codecs}


def test_pins_that_do_not_fit_on_the_disk_are_not_read_again_in_whatever_codec(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "cache", 3 * BLOCK)
    house = House(tmp_path, disk)
    house.add("c", *MANY)
    assert house.store.chain.flush(20)
    house.store.forget([house.key(path) for path in MANY])
    assert three_passes(house, "rules:\n- {pin: disk, codec: {disk: int8}}\n") == [3, 0, 0]
    assert len(house.tiers.refused("disk")) == 5
    assert sorted(on_disk(house).values()) == ["int8"] * 3
    house.work.catalogue.close()
    disk.close()


def test_copies_on_disk_are_in_the_codec_that_their_documents_rule_says(disked: House) -> None:
    disked.add("c", "a.txt", "b.txt")
    disked.store.forget([disked.key(path) for path in ("a.txt", "b.txt")])
    disked.says('rules:\n- {match: {path: "a.txt"}, codec: {disk: int8}}\n')
    for path in ("a.txt", "b.txt"):
        disked.store.get(disked.key(path), PROFILE)
    assert on_disk(disked) == {"a.txt": "int8", "b.txt": ""}
    disked.says("")
    assert on_disk(disked) == {"b.txt": ""}, "a copy that no rule allows any more is gone"


def test_what_is_pinned_to_the_disk_comes_again_in_the_codec_of_a_changed_rule(disked: House) -> None:
    disked.add("c", "a.txt")
    disked.store.forget([disked.key("a.txt")])
    for codec in ("int8", "int4", "lossless"):
        disked.says(f"rules:\n- {{pin: disk, codec: {{disk: {codec}, memory: raw}}}}\n")
        assert on_disk(disked) == {"a.txt": codec}


def test_a_text_of_several_documents_is_kept_as_the_most_exact_of_their_rules_says(disked: House) -> None:
    for corpus in ("c", "d", "e"):
        disked.add(corpus, "same.txt")
    with disked.work.catalogue.read() as session:
        [key] = set(session.scalars(select(ChunkRow.kv_key)))  # one object for the three

    def kept_as(rules: str) -> str:
        disked.store.forget([str(key)])
        disked.says(rules)
        disked.store.get(str(key), PROFILE)
        assert disked.store.chain.flush(20)
        return disked.store.chain.held("disk")[str(key)].codec

    two = "rules:\n- {match: {corpus: c}, codec: {disk: int4}}\n- {match: {corpus: d}, codec: {disk: int8}}\n"
    assert kept_as(two) == "", "of the third document nothing is said: it has the object's own"
    assert kept_as(two + "- {codec: {disk: int4}}\n") == "int8"


def test_rules_about_use_change_the_codec_of_copies_with_time(disked: House) -> None:
    disked.add("c", "a.txt")
    disked.says('rules:\n- {match: {use: {last: "> 7d"}}, pin: disk, codec: {disk: int4}}\n- {pin: disk}\n')
    assert on_disk(disked) == {"a.txt": ""}
    disked.store.forget([disked.key("a.txt")])
    disked.now += 8 * 86400
    disked.placement.tick()
    assert on_disk(disked) == {"a.txt": "int4"}


# --- a clock that jumps ---


@pytest.mark.parametrize("hours", [25, -25])
def test_a_clock_that_jumps_lets_no_pin_go_and_stops_no_look(house: House, hours: int) -> None:
    house.add("c", "hot/a.txt", "kept.txt", *MANY[:5])
    house.now = at("2026-11-27 12:00")
    house.says(
        'rules:\n- {match: {path: "hot/*"}, pin: memory}\n- {match: {path: "kept.txt"}, keep: {for: 2h}}\n'
        '- {match: {path: "other/0*"}, prefetch: every day at 13:00 Europe/Berlin}\n'
    )
    house.use("kept.txt")
    house.placement.tick()
    assert house.key("kept.txt") in house.placement.pinned("memory")
    house.now += hours * 3600
    house.placement.tick()
    house.flood()
    assert "hot/a.txt" in house.in_memory()
    house.add("d", "hot/new.txt")
    house.pass_over()
    assert "hot/new.txt" in house.in_memory(), "the next look comes when it would have come"
    house.store.forget([house.key("other/0.txt")])
    house.now = at("2026-11-28 13:00" if hours > 0 else "2026-11-26 13:00")
    house.placement.tick()
    house.store.forget([house.key("other/0.txt")])
    house.now += 86400
    house.placement.tick()
    assert "other/0.txt" in house.in_memory(), "tomorrow's time is not the day after tomorrow's"
    assert house.key("kept.txt") not in house.placement.pinned("memory"), "a hold ends as long after the use as it is said"
