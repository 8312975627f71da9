"""The bases of codecs are looked after: what is broken is named and made again, what nothing names goes, what is used stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fixtures_work import Work, paragraphs
from sqlalchemy import select
from test_garbage import DAY, PROFILE, age, kv_name, overwrite

from ingest.bases import collect_bases
from ingest.verify import Findings, Verifier
from precompute.rows import request_repair
from storage.catalogue.schema import KVObject
from storage.codecs.basis import Basis
from storage.codecs.shelf import CodecShelf, basis_name
from storage.errors import StorageUnavailable
from storage.kvstore import KVStore
from storage.types import KVProfile, KVRecord, Miss

NOTE = f"basis-of/{'ab' * 32}"


def basis(seed: int = 0) -> Basis:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.eye(4) + 0.1 * torch.randn(1, 1, 4, 4, generator=generator)
    return Basis(torch.zeros(1, 2, 1, 4), torch.full((1,), 0.1), matrix.to(torch.bfloat16))


def compute(work: Work, store: KVStore, used: Basis) -> KVProfile:
    """Store an object for every owed row with this basis; what they are read as."""
    codec = store.codecs.add(used)
    profile = replace(PROFILE, codec=codec.name)
    with work.catalogue.write() as session:
        for row in session.scalars(select(KVObject).where(KVObject.status == "pending")):
            ids = tuple(range(row.tokens))
            row.bytes = store.put(KVRecord(row.key, profile, ids, torch.ones(1, 2, 1, len(ids), 4)))
            row.status = "done"
    return profile


@pytest.fixture
def used(work: Work) -> Basis:
    """Of three stored objects, noted for a model, and all of it old."""
    work.ingest(work.corpus(), {"a.txt": paragraphs(3)})
    made, store = basis(), KVStore(work.objects)
    compute(work, store, made)
    store.codecs.note("ab" * 32, store.codecs.add(made))
    for name in list(work.objects.list("")):
        age(work, name, 7 * DAY)
    return made


def keys(work: Work) -> list[str]:
    with work.catalogue.read() as session:
        return list(session.scalars(select(KVObject.key).order_by(KVObject.key)))


def verify(work: Work, restore: Callable[[str], bool] | None = None, repair: bool = False) -> Findings:
    def owe(key: str) -> bool:
        with work.catalogue.write() as session:
            return request_repair(session, key)

    return Verifier(work.catalogue, work.objects, 1.0, owe if repair else None, restore=restore).run()


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_sound_basis_is_counted_and_nothing_said(work: Work, used: Basis) -> None:
    found = verify(work)
    assert found.problems == []
    assert found.shown()["basis"]["objects"] == 1
    assert found.unrepaired == 0


@pytest.mark.parametrize("trouble", ["damaged", "missing"])
def test_a_broken_basis_is_named_and_not_each_object_that_needs_it(work: Work, used: Basis, trouble: str) -> None:
    name = basis_name(used.digest)
    overwrite(work, name, flip) if trouble == "damaged" else work.objects.delete(name)
    found = verify(work)
    assert found.problems == [{"name": name, "problem": trouble}]
    assert found.counts["kv"]["unreadable"] == 3
    assert found.unrepaired == 4
    with work.catalogue.read() as session:
        assert {row.status for row in session.scalars(select(KVObject))} == {"done"}, "nothing is changed unasked"


def test_a_basis_that_is_made_again_makes_its_objects_readable(work: Work, used: Basis) -> None:
    overwrite(work, basis_name(used.digest), flip)
    asked = []

    def restore(digest: str) -> bool:
        asked.append(digest)
        CodecShelf(work.objects).add(used)
        return True

    found = verify(work, restore, repair=True)
    assert asked == [used.digest]
    assert (found.counts["basis"]["repaired"], found.counts["kv"]["unreadable"], found.unrepaired) == (1, 0, 0)
    assert verify(work).problems == []


def test_what_depends_on_a_basis_that_is_lost_is_computed_again(work: Work, used: Basis) -> None:
    work.objects.delete(basis_name(used.digest))
    found = verify(work, lambda digest: False, repair=True)
    assert found.counts["kv"]["repaired"] == 3
    assert found.unrepaired == 1, "the note still leads nowhere, until a process makes a basis"
    compute(work, KVStore(work.objects), basis(1))
    store = KVStore(work.objects)
    store.codecs.note("ab" * 32, store.codecs.add(basis(1)))
    again = verify(work)
    assert (again.problems, again.unrepaired) == ([], 0)


def test_a_damaged_object_of_a_sound_basis_is_named_itself(work: Work, used: Basis) -> None:
    first = keys(work)[0]
    overwrite(work, kv_name(first), flip)
    assert verify(work).problems == [{"name": kv_name(first), "problem": "damaged"}]


def test_a_note_that_names_nothing_is_named(work: Work, used: Basis) -> None:
    work.objects.put(NOTE, [b"<html>no digest</html>"])
    assert {"name": NOTE, "problem": "damaged"} in verify(work).problems


def test_a_process_that_has_read_the_basis_goes_on_without_it(work: Work, used: Basis) -> None:
    warm, [key, *_] = KVStore(work.objects), keys(work)
    profile = replace(PROFILE, codec=f"transform:{used.digest}")
    assert isinstance(warm.get(key, profile), KVRecord)
    overwrite(work, basis_name(used.digest), flip)
    for each in keys(work):
        assert isinstance(warm.get(each, profile), KVRecord)
    again = warm.get(key, profile)
    assert isinstance(again, KVRecord)
    assert warm.put(again) > 0
    assert KVStore(work.objects).get(key, profile) is Miss.DAMAGED, "one that has not"


def test_only_bases_that_neither_a_note_nor_an_object_names_are_collected(work: Work, used: Basis) -> None:
    shelf = CodecShelf(work.objects)
    noted, lost, young = basis(1), basis(2), basis(3)
    for each in (noted, lost, young):
        shelf.add(each)
    work.objects.put(NOTE, [noted.digest.encode()])  # `used` is now named by its objects alone
    for each in (noted, lost):
        age(work, basis_name(each.digest))
    found = collect_bases(work.objects)
    assert (found.taken, found.bytes, found.young) == (1, len(lost.to_bytes()), 1)
    assert set(work.objects.list("basis/")) == {basis_name(each.digest) for each in (used, noted, young)}
    with work.catalogue.write() as session:
        for row in session.scalars(select(KVObject)):
            work.objects.delete(kv_name(row.key))
    assert collect_bases(work.objects).taken == 1, "and when its objects have gone, it goes"
    assert set(work.objects.list("basis/")) == {basis_name(each.digest) for each in (noted, young)}


def test_an_object_that_cannot_be_read_keeps_every_basis(work: Work, used: Basis, monkeypatch: pytest.MonkeyPatch) -> None:
    work.objects.delete(NOTE)
    read = work.objects.read_into

    def away(name: str, buffer: memoryview, offset: int = 0) -> int:
        if name.startswith("kv/"):
            raise StorageUnavailable("away")
        return int(read(name, buffer, offset))

    monkeypatch.setattr(work.objects, "read_into", away)
    with pytest.raises(StorageUnavailable):
        collect_bases(work.objects)
    assert work.objects.size(basis_name(used.digest)) is not None


def test_a_clock_that_jumps_takes_no_basis_in_use(work: Work, used: Basis, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for jump in (25 * 3600, -25 * 3600):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        assert collect_bases(work.objects).taken == 0
    assert os.path.exists(work.objects._path(basis_name(used.digest)))
