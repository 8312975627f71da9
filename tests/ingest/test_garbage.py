"""Orphans go after a grace time; nothing in use, or just being written, ever does."""

from __future__ import annotations

import hashlib
import os
import time

import pytest
import torch
from fixtures_work import Work, paragraphs
from sqlalchemy import select, update

from ingest.files import raw_name, read_file, store_file
from ingest.garbage import PARTS, Collected, Collector, collect, orphans
from ingest.purge import owe, sweep
from ingest.verify import Verifier
from precompute.rows import request_repair
from storage.catalogue.schema import ChunkRow, File, KVObject
from storage.errors import StorageUnavailable
from storage.format import encode
from storage.kvstore import KVStore
from storage.types import KVProfile, KVRecord

PROFILE = KVProfile(
    model="tiny", weights="w", tokenizer="t", frame="f", conditioning="none", codec="raw", dtype="float32",
    layers=1, kv_heads=1, head_dim=4,
)  # fmt: skip
DAY = 24 * 3600.0


def kv_name(key: str) -> str:
    return f"kv/{key[:2]}/{key}"


def compute(work: Work) -> list[str]:
    """Store an object for every owed row, as the KV worker does: object first, then the row. Their keys."""
    store = KVStore(work.objects)
    with work.catalogue.write() as session:
        owed = session.scalars(select(KVObject).where(KVObject.status == "pending").order_by(KVObject.key)).all()
        for row in owed:
            ids = tuple(range(row.tokens))
            row.bytes = store.put(KVRecord(row.key, PROFILE, ids, torch.ones(1, 2, 1, len(ids), 4)))
            row.status = "done"
        return [row.key for row in owed]


def age(work: Work, name: str, seconds: float = 2 * DAY) -> None:
    then = time.time() - seconds
    os.utime(work.objects._path(name), (then, then))


def collect_all(work: Work) -> Collected:
    found = sum((collect(work.catalogue, work.objects, part) for part in PARTS), Collected())
    sweep(work.catalogue, KVStore(work.objects).delete)
    return found


@pytest.fixture
def stored(work: Work) -> list[str]:
    """Three chunks of one document, everything stored and a week old; the keys."""
    work.ingest(work.corpus(), {"a.txt": paragraphs(3)})
    keys = compute(work)
    for name in list(work.objects.list("")):
        age(work, name, 7 * DAY)
    return keys


def test_what_a_row_knows_is_never_collected_however_old(work, stored):
    before = set(work.objects.list(""))
    assert len(before) == 4
    assert collect_all(work) == Collected()
    assert set(work.objects.list("")) == before


@pytest.mark.parametrize("status", ["pending", "leased", "failed", "over_quota"])
def test_an_object_whose_row_is_not_done_yet_is_not_an_orphan(work, stored, status):
    """The object is written before its row says so; the row itself was there before."""
    with work.catalogue.write() as session:
        session.execute(update(KVObject).values(status=status))
    assert collect_all(work) == Collected()
    assert verify(work).counts["kv"]["orphans"] == 0


def test_orphans_go_after_the_grace_time_and_not_before(work, stored):
    lost = [kv_name("ab" * 32), kv_name("00" * 32), raw_name("t1", "cd" * 32), raw_name("gone", "ef" * 32)]
    for name in lost:
        work.objects.put(name, [b"twelve bytes"])
    young = collect_all(work)
    assert (young.taken, young.young) == (0, 4)
    assert set(lost) <= set(work.objects.list(""))
    for name in lost:
        age(work, name)
    assert collect_all(work) == Collected(taken=4, bytes=48)
    assert not set(lost) & set(work.objects.list(""))
    assert len(list(work.objects.list(""))) == 4, "and nothing else"
    assert work.count(KVObject, KVObject.status == "purge") == 0


def test_what_is_not_named_like_an_object_of_ours_is_left_alone(work):
    for name in ("kv/ab/readme", "kv/ab/" + "AB" * 32, "raw/0/x", "elsewhere/" + "ab" * 32):
        work.objects.put(name, [b"x"])
        age(work, name)
    assert collect_all(work) == Collected()
    assert len(list(work.objects.list(""))) == 4


def test_a_chunk_that_comes_back_while_its_orphan_is_collected_takes_it_back(work):
    key = "ab" * 32
    work.objects.put(kv_name(key), [b"old"])
    age(work, kv_name(key))
    assert collect(work.catalogue, work.objects, "kv/ab/").taken == 1
    with work.catalogue.write() as session:
        owed, _ = owe(session, {key: 5}, "t1", "group", "job-1")
    assert owed == {key}
    sweep(work.catalogue, KVStore(work.objects).delete)
    with work.catalogue.read() as session:
        row = session.get_one(KVObject, key)
    assert (row.status, row.tenant_id, row.sharing_group) == ("pending", "t1", "group")


def test_an_upload_that_comes_between_looking_and_deleting_keeps_its_bytes(work, monkeypatch):
    data = b"the same bytes again"
    work.corpus()
    name = raw_name("t1", hashlib.sha256(data).hexdigest())
    work.objects.put(name, [data])
    age(work, name)

    def looked_then_uploaded(catalogue, infos):
        found = orphans(catalogue, infos)
        store_file(work.catalogue, work.objects, "t1", "a.txt", data)
        return found

    monkeypatch.setattr("ingest.garbage.orphans", looked_then_uploaded)
    collect_all(work)
    with work.catalogue.read() as session:
        file = session.scalars(select(File)).one()
    assert read_file(work.objects, file) == data


def test_one_call_takes_no_more_than_it_is_told(work):
    for number in range(30):
        name = kv_name(f"ab{number:062}")
        work.objects.put(name, [b"x"])
        age(work, name)
    assert collect(work.catalogue, work.objects, "kv/ab/", most=7).taken == 7
    assert work.count(KVObject, KVObject.status == "purge") == 7


def test_the_tick_takes_one_part_at_a_time_and_reaches_all(work):
    now = [0.0]
    collector = Collector(work.catalogue, lambda: work.objects, clock=lambda: now[0])
    names = [kv_name(f"{number:02x}" * 32) for number in range(0, 256, 51)] + [raw_name("t", "ab" * 32)]
    for name in names:
        work.objects.put(name, [b"x"])
        age(work, name)
    assert collector.tick() == Collected(), "it is not time yet"
    taken = 0
    for _ in PARTS:
        now[0] += 30
        taken += (step := collector.tick()).taken
        assert step.taken <= 1
        assert collector.tick() == Collected()
    assert taken == len(names)


def test_a_store_that_is_down_fails_no_tick(work):
    def down():
        raise StorageUnavailable("down")

    now = [0.0]
    collector = Collector(work.catalogue, down, clock=lambda: now[0])
    now[0] += 60
    assert collector.tick() == Collected()


# --- verify ------------------------------------------------------------------------------------------------


def verify(work: Work, *, repair: bool = False, sample: float = 1.0):
    def owe_again(key: str) -> bool:
        with work.catalogue.write() as session:
            return request_repair(session, key)

    return Verifier(work.catalogue, work.objects, sample, owe_again if repair else None).run()


def overwrite(work: Work, name: str, change) -> None:
    data = bytearray(work.objects.size(name))
    work.objects.read_into(name, memoryview(data))
    work.objects.put(name, [change(data)])


def flip(data: bytearray) -> bytes:
    data[len(data) // 2] ^= 1
    return bytes(data)


def test_a_sound_store_has_nothing_to_say(work, stored):
    found = verify(work)
    assert found.counts["kv"] == {"rows": 3, "objects": 3, "checked": 3, "orphans": 0}
    assert found.counts["raw"] == {"rows": 1, "objects": 1, "checked": 1, "orphans": 0}
    assert not found.problems
    assert found.unrepaired == 0


def test_each_kind_of_trouble_is_named_repaired_and_computed_again(work, stored):
    missing, damaged, swapped = stored
    work.objects.delete(kv_name(missing))
    overwrite(work, kv_name(damaged), flip)
    with work.catalogue.read() as session:
        tokens = session.get_one(KVObject, swapped).tokens
    overwrite(work, kv_name(swapped), lambda data: b"".join(encode(make("cd" * 32, tokens))))
    work.objects.put(kv_name("ab" * 32), [b"orphan"])
    found = verify(work)
    named = {(problem["name"], problem["problem"]) for problem in found.problems}
    expected = {(kv_name(missing), "missing"), (kv_name(damaged), "damaged"), (kv_name(swapped), "wrong_key")}
    assert named == expected
    assert found.counts["kv"]["orphans"] == 1
    assert found.unrepaired == 3
    assert work.count(KVObject, KVObject.status == "done") == 3, "nothing is changed unless it is asked for"

    assert verify(work, repair=True).unrepaired == 0
    assert sorted(compute(work)) == sorted(stored)
    assert verify(work).unrepaired == 0


def make(key: str, tokens: int) -> KVRecord:
    return KVRecord(key, PROFILE, tuple(range(tokens)), torch.ones(1, 2, 1, tokens, 4))


def test_a_truncated_object_is_found_without_reading_any(work, stored):
    overwrite(work, kv_name(stored[0]), lambda data: bytes(data[:-1]))
    found = verify(work, sample=0)
    assert found.counts["kv"]["damaged"] == 1
    assert found.counts["kv"]["checked"] == 0


def test_files_that_are_lost_or_damaged_are_named(work, stored):
    second = store_file(work.catalogue, work.objects, "t1", "b.txt", b"other bytes")
    [first] = [name for name in work.objects.list("raw/") if name != raw_name("t1", second.sha256)]
    work.objects.delete(first)
    overwrite(work, raw_name("t1", second.sha256), flip)
    found = verify(work, repair=True)
    assert found.counts["raw"]["missing"] == 1
    assert found.counts["raw"]["damaged"] == 1
    assert {"name": second.id, "problem": "damaged"} in found.problems
    assert found.unrepaired == 2, "no computation brings an upload back"


def test_what_is_deleted_or_stored_while_verify_runs_is_no_trouble(work, stored):
    """The listing is older than the rows: here by two deletions, one of a row that is computed again, and an upload."""
    gone, moved, _ = stored
    entries = work.objects.entries

    def stale(prefix):
        listed = [info for info in entries(prefix) if info.name != kv_name(moved)]
        if prefix == f"kv/{gone[:2]}/":
            with work.catalogue.write() as session:
                session.execute(update(KVObject).where(KVObject.key == gone).values(status="purge"))
            work.objects.delete(kv_name(gone))
        return iter(listed)

    work.objects.entries = stale
    assert verify(work, repair=True).unrepaired == 0
    assert work.count(KVObject, KVObject.status == "done") == 2


def test_what_a_parent_site_stores_is_not_missing_here(work, stored):
    here, there, nowhere = stored
    for key in (there, nowhere):
        work.objects.delete(kv_name(key))
    asked = []

    def parent(keys):
        asked.extend(keys)
        return {there, here} & set(keys)

    found = Verifier(work.catalogue, work.objects, elsewhere=parent).run()
    assert found.problems == [{"name": kv_name(nowhere), "problem": "missing"}]
    assert sorted(asked) == sorted([there, nowhere]), "what is here is not asked for"


def test_an_object_in_a_strange_place_is_left_alone(work, stored):
    """Its key has another beginning than its folder: it would be taken again and again, and never go."""
    strange = f"kv/{'00' if stored[0][:2] != '00' else '01'}/{stored[0]}"
    work.objects.put(strange, [b"x"])
    age(work, strange)
    assert collect_all(work).taken == 0
    assert strange in set(work.objects.list("kv/"))


def test_references_are_counted_by_asking(work, stored):
    """A chunk in a second document holds the object when the first one goes."""
    corpus = work.corpus("two")
    work.ingest(corpus, {"copy.txt": paragraphs(3)})
    assert work.count(KVObject) == 3
    assert work.count(ChunkRow) == 6
    receipt = work.deleter.document("t1", work.document(corpus, "copy.txt").id)
    assert (receipt["kv_objects"], receipt["kv_kept"]) == (0, 3)
    assert verify(work).unrepaired == 0


@pytest.mark.parametrize("hours", [25, -25])
def test_a_clock_that_jumps_takes_nothing_in_use_and_leaves_nothing_for_ever(work, stored, hours, monkeypatch):
    work.ingest(work.corpus("fresh"), {"new.txt": paragraphs(2, tag="new")})
    fresh = compute(work)
    with work.catalogue.write() as session:
        session.execute(update(KVObject).where(KVObject.key == fresh[0]).values(status="leased"))  # its object came first
    orphan = kv_name("ab" * 32)
    work.objects.put(orphan, [b"lost"])
    age(work, orphan)
    in_use = set(work.objects.list("")) - {orphan}
    real, jumped = time.time, [hours * 3600.0]
    monkeypatch.setattr(time, "time", lambda: real() + jumped[0])
    collect_all(work)
    work.objects.sweep(DAY)
    assert in_use <= set(work.objects.list(""))
    assert verify(work).unrepaired == 0
    jumped[0] = 0.0  # the clock is right again
    collect_all(work)
    assert set(work.objects.list("")) == in_use
