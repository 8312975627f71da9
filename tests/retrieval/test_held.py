"""What searches hold in memory of the index: never anything else than what their snapshot has, and never more than so much."""

from __future__ import annotations

import numpy as np
import pytest
from small_library import Library
from sqlalchemy.orm import Session

from retrieval import held_lists, held_vectors
from retrieval.held_lists import HeldLists
from retrieval.held_vectors import HeldVectors

COUNT = 3000  # more than are compared exactly, in three blocks


def unit(rng: np.random.Generator, count: int) -> np.ndarray:
    vectors = rng.standard_normal((count, 64)).astype("<f4")
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def nearest(library: Library, session: Session, asked: np.ndarray) -> list[tuple[int, float]]:
    return library.index.dense(session, ["vs_1"], asked.tolist(), 20)


def worded(library: Library, session: Session, query: str) -> list[int]:
    return sorted(id_ for id_, _ in library.index.lexical(session, ["vs_1"], query, COUNT))


def test_what_another_process_changes_is_found_as_it_is_and_a_snapshot_keeps_what_it_had(library: Library) -> None:
    rng = np.random.default_rng(0)
    vectors, moved = unit(rng, COUNT), unit(rng, 40)
    with library.catalogue.write() as session:
        library.index.add(session, "vs_1", [(i + 1, v.tolist(), f"kiwi w{i % 5}") for i, v in enumerate(vectors)])
    with library.catalogue.read() as session:
        before = nearest(library, session, vectors[7])
        assert before[0][0] == 8
        assert nearest(library, session, vectors[7]) == before
        assert 8 in worded(library, session, "w2")
    catalogue, index, _ = library.warm()
    with library.catalogue.read() as old:
        assert nearest(library, old, vectors[7]) == before
        changed = [id_ for id_, _ in before] + list(range(500, 520))
        with catalogue.write() as session:  # the ids go to other chunks
            index.remove(session, changed)
            index.add(session, "vs_1", [(i, v.tolist(), "plum") for i, v in zip(changed, moved, strict=True)])
        with library.catalogue.read() as new:
            now = dict(enumerate(vectors, start=1)) | dict(zip(changed, moved, strict=True))
            for asked in (vectors[7], *moved[:5]):
                found = nearest(library, new, asked)
                assert [score for _, score in found] == pytest.approx([float(now[i] @ asked) for i, _ in found], abs=1e-5)
            assert nearest(library, new, moved[0])[0][0] == changed[0]
            assert worded(library, new, "plum") == sorted(changed)
            assert 8 not in worded(library, new, "w2")
        assert nearest(library, old, vectors[7]) == before
        assert 8 in worded(library, old, "w2")
        assert worded(library, old, "plum") == []
    catalogue.close()


def test_a_search_finds_the_same_whether_its_vectors_and_lists_are_held_or_have_no_place(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    vectors, asked = unit(rng, COUNT), unit(rng, 12)
    with library.catalogue.write() as session:
        library.index.add(session, "vs_1", [(i + 1, v.tolist(), f"kiwi w{i % 50}") for i, v in enumerate(vectors)])
    monkeypatch.setattr(held_vectors, "MOST_BYTES", 264 * 100)
    monkeypatch.setattr(held_lists, "MOST_BYTES", 1000)
    catalogue, crowded, _ = library.warm()
    catalogue.close()
    with library.catalogue.read() as session:
        for round_ in range(2):
            for number, one in enumerate(asked):
                found, expected = (
                    index.dense(session, ["vs_1"], one.tolist(), 20) for index in (crowded, library.index)
                )
                assert [id_ for id_, _ in found] == [id_ for id_, _ in expected], round_
                found, expected = (
                    index.lexical(session, ["vs_1"], f"kiwi w{number}", 20) for index in (crowded, library.index)
                )
                assert found == expected
                assert len(found) == 20


def test_vectors_are_held_within_so_many_bytes_and_found_by_their_keys_alone() -> None:
    held = HeldVectors(10 * (8 + 4 * 3))  # ten of three components
    keys, vectors = np.arange(8, dtype=np.int64), np.arange(24, dtype="<f4").reshape(8, 3)
    assert not held.get(keys, 3)[1].any()
    held.put(keys, vectors)
    held.put(np.array([12, 13]), vectors[:2] + 100)  # where 2 and 3 were
    found, known = held.get(np.array([0, 2, 3, 7, 10, 12, 13]), 3)
    assert known.tolist() == [True, False, False, True, False, True, True]
    assert found[known].tolist() == np.concatenate([vectors[[0, 7]], vectors[:2] + 100]).tolist()


def test_lists_are_held_within_so_many_bytes_and_those_used_last_stay() -> None:
    held = HeldLists(3 * (held_lists.ENTRY + 80))
    lists = {name: np.arange(10) + place for place, name in enumerate("abc")}
    held.put(1, lists)
    assert held.get(2, "abc") == {}
    assert held.get(1, "a").keys() == {"a"}
    held.put(2, {"d": np.arange(10)})
    assert held.get(1, "abc").keys() == {"a", "c"}
    assert held.get(1, "a")["a"].tolist() == list(range(10))
    held.put(1, {"long": np.arange(1000)})
    assert held.get(1, ["long"]) == {}
