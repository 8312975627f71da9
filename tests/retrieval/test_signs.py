"""Candidates by signs, and the blocks that SQLite keeps them in."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from fixtures_work import empty_catalogue
from small_library import Library
from sqlalchemy import text
from sqlalchemy.orm import Session

from retrieval import sign_blocks, signs, sqlite_index


def unit(rng: np.random.Generator, count: int, dimensions: int = 64) -> np.ndarray:
    vectors = rng.standard_normal((count, dimensions)).astype("<f4")
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_few_bits_that_differ_come_first_and_of_those_the_ones_that_weigh_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "LOOKED_AT_TWICE", 10)
    rng = np.random.default_rng(0)
    for dimensions in (8, 60, 64, 100, 384):
        vectors, asked = unit(rng, 300, dimensions), unit(rng, 1, dimensions)[0]
        different = ((vectors > 0) != (asked > 0)).sum(1)
        codes = np.ascontiguousarray(signs.signs(vectors).T)
        for most in (10, 30, 100):
            order = signs.nearest(codes, asked, most)
            assert len(set(order.tolist())) == len(order) == min(10 * most, 300)
            assert sorted(different[order]) == np.sort(different)[: len(order)].tolist()
            agreed = np.where(vectors[order] > 0, 1, -1) @ asked
            assert (np.diff(agreed) <= 1e-5).all()


def test_up_to_so_many_chunks_a_search_is_exact_and_beyond_them_nearly(library: Library) -> None:
    """Vectors in clusters, as those of texts are. On PostgreSQL a search is exact at any size."""
    rng = np.random.default_rng(0)
    centres = unit(rng, 400)
    for count, least in ((signs.EXACT, 1.0), (4 * signs.EXACT, 0.95)):
        vectors = centres[rng.integers(0, 400, count)] + 0.1 * rng.standard_normal((count, 64))
        vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("<f4")
        name = f"vs_of_{count}"
        library.corpus(name)
        first = 1 + count * 10
        with library.catalogue.write() as session:
            library.index.add(session, name, [(first + i, v.tolist(), "w") for i, v in enumerate(vectors)])
        shares = []
        with library.catalogue.read() as session:
            for asked in vectors[:: count // 20] + 0.02 * unit(rng, len(vectors[:: count // 20])):
                asked /= np.linalg.norm(asked)
                found = [id_ - first for id_, _ in library.index.dense(session, [name], asked.tolist(), 8)]
                best = np.argsort(-(vectors @ asked), kind="stable")[:8]
                shares.append(len(set(found) & set(best.tolist())) / 8)
        assert np.mean(shares) >= least


def test_blocks_hold_each_vector_once_through_adding_and_removing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sign_blocks, "BLOCK", 16)
    library = Library(empty_catalogue(tmp_path / "catalogue.db"))
    library.index.ensure()
    library.corpus("vs_1")
    rng = np.random.default_rng(0)
    vectors: dict[int, list[float]] = {}
    warm = sign_blocks.HeldSigns(library.index.generations.name)
    for step in range(60):
        with library.catalogue.write() as session:
            new = {step * 100 + i: unit(rng, 1)[0].tolist() for i in range(int(rng.integers(1, 40)))}
            library.index.add(session, "vs_1", [(id_, vector, "w") for id_, vector in new.items()])
            vectors |= new
            gone = [id_ for id_ in vectors if rng.random() < 0.4]
            library.index.remove(session, [*gone, 1_000_000])
            vectors = {id_: vector for id_, vector in vectors.items() if id_ not in set(gone)}
        with library.catalogue.read() as session:
            for held in (warm, sign_blocks.HeldSigns(library.index.generations.name)):
                found = held.read(session, ["vs_1"])
                assert sorted(found.ids.tolist()) == sorted(vectors)
                expected = signs.signs(np.asarray([vectors[int(id_)] for id_ in found.ids], dtype="<f4"))
                assert (found.codes == expected.T).all()
            sizes = session.scalars(text(f"SELECT chunks FROM index_signs_{library.index.generations.name}")).all()
    assert max(sizes) <= 16
    assert len(sizes) <= len(vectors) // 4 + 2  # emptied blocks do not pile up
    library.catalogue.close()


def test_a_warm_process_has_what_its_snapshot_has_and_reads_only_blocks_that_changed(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.catalogue.dialect != "sqlite":
        pytest.skip("signs are kept for SQLite only")
    monkeypatch.setattr(sign_blocks, "BLOCK", 4)
    read, block = [], sign_blocks._block
    monkeypatch.setattr(sign_blocks, "_block", lambda *given: read.append(1) or block(*given))
    first = library.put("vs_1", "a", *(f"kiwi {number}" for number in range(18)))
    catalogue, warm, _ = library.warm()
    vector = library.embedder.embed(["kiwi"])[0]

    def found(session: Session) -> tuple[set[int], int]:
        read.clear()
        return {id_ for id_, _ in warm.dense(session, ["vs_1"], vector, 50)}, len(read)

    with catalogue.read() as before:
        assert found(before) == (set(first), 5)
        second = library.put("vs_1", "b", "kiwi again")
        with catalogue.read() as after:
            assert found(after) == ({*first, *second}, 1)
            assert found(after) == ({*first, *second}, 0)
        assert found(before) == (set(first), 1)  # its own snapshot still, whatever others have seen meanwhile
    library.drop("vs_1", "b")
    third = library.put("vs_1", "c", "kiwi in the place of another, under the same number")
    assert third == second  # and in a block of the same number and size
    with catalogue.read() as session:
        assert found(session) == ({*first, *third}, 1)
    with contextlib.suppress(ZeroDivisionError), library.catalogue.write() as session:
        library.index.remove(session, first)
        assert {id_ for id_, _ in library.index.dense(session, ["vs_1"], vector, 50)} == set(third)
        raise ZeroDivisionError
    with library.catalogue.read() as session:  # what was rolled back is not remembered
        assert {id_ for id_, _ in library.index.dense(session, ["vs_1"], vector, 50)} == {*first, *third}
    catalogue.close()


def test_memory_for_signs_is_bounded_and_what_has_no_place_is_searched_all_the_same(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.catalogue.dialect != "sqlite":
        pytest.skip("signs are kept for SQLite only")
    monkeypatch.setattr(sign_blocks, "MOST_BYTES", 100)  # four chunks with codes of one word
    for number, name in enumerate(("vs_2", "vs_3", "vs_4")):
        library.corpus(name)
        library.put(name, "doc", *(["kiwi"] * (2 + 8 * number)))
    held = library.index._signs._held
    for names in (["vs_2"], ["vs_2", "vs_3"], ["vs_4"], ["vs_2"]):
        assert library.find("kiwi", *names) != []
        assert sum(each.bytes for each in held.values()) <= 100
    assert list(held) == [("vs_2",)]


@pytest.mark.parametrize("count", [200, 1000])
def test_up_to_so_many_chunks_that_pass_are_compared_exactly_however_far_away_they_are(library: Library, count: int) -> None:
    rng = np.random.default_rng(0)
    vectors = unit(rng, 6000)
    with library.catalogue.write() as session:
        library.index.add(session, "vs_1", [(i + 1, v.tolist(), "w") for i, v in enumerate(vectors)])
    allowed = np.sort(rng.choice(6000, count, replace=False))
    rules = Passing(allowed + 1)
    with library.catalogue.read() as session:
        for asked in unit(rng, 5):
            found = library.index.dense(session, ["vs_1"], asked.tolist(), 8, rules)
            best = allowed[np.argsort(-(vectors[allowed] @ asked), kind="stable")[:8]] + 1
            assert [id_ for id_, _ in found] == best.tolist()


class Passing:
    """Rules that let these chunks through."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids, self.listed = ids, 0

    def among(self, _session: object, chunk_ids: list[int]) -> np.ndarray:
        return self.ids[np.isin(self.ids, chunk_ids)]

    def all(self, _session: object) -> np.ndarray:
        self.listed += 1
        return self.ids

    def passing(self, _session: object) -> tuple[str, dict[str, object]]:
        return "SELECT unnest(CAST(:passing AS bigint[]))", {"passing": self.ids.tolist()}


@pytest.mark.parametrize(("closed", "listed"), [("none", 0), ("every other", 0), ("the nearest 30", 0), ("the nearest 900", 1)])
def test_of_many_chunks_the_nearest_that_pass_are_found_and_all_that_pass_are_listed_only_where_those_are_hard_to_find(
    library: Library, closed: str, listed: int
) -> None:
    """On SQLite; PostgreSQL lists them in the search itself."""
    rng = np.random.default_rng(1)
    asked = unit(rng, 1)[0]
    vectors = asked + np.linspace(0.05, 1.0, 3000)[:, None] * unit(rng, 3000)  # ever further away
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("<f4")
    with library.catalogue.write() as session:
        library.index.add(session, "vs_1", [(i + 1, v.tolist(), "w") for i, v in enumerate(vectors)])
    order = np.argsort(-(vectors @ asked), kind="stable") + 1
    of = {"none": order, "every other": order[::2], "the nearest 30": order[30:], "the nearest 900": order[900:]}[closed]
    rules = Passing(np.sort(of))
    with library.catalogue.read() as session:
        found = [id_ for id_, _ in library.index.dense(session, ["vs_1"], asked.tolist(), 50, rules)]
    assert set(found) <= set(of.tolist())
    assert len(set(found[:8]) & set(of[:8].tolist())) == 8
    assert len(set(found) & set(of[:50].tolist())) >= 40
    assert rules.listed == (listed if library.catalogue.dialect == "sqlite" else 0)


@pytest.mark.parametrize("passing", [0.9, 0.5, 0.1, 0.004])
def test_of_the_ranked_chunks_those_that_pass_are_found_in_order_however_few_they_are(passing: float) -> None:
    rng = np.random.default_rng(0)
    ranked = rng.permutation(5000)
    rules = Passing(np.sort(rng.choice(5000, int(5000 * passing), replace=False)))
    found = sqlite_index._permitted(None, ranked, 200, rules)
    assert found.tolist() == ranked[np.isin(ranked, rules.ids)][:200].tolist()
    assert rules.listed == (passing < 0.2)  # listing all that pass is for rules that let few through


def test_the_nearest_may_all_be_closed_and_a_good_deal_of_the_rest_is_looked_at_before_all_that_pass_are_listed() -> None:
    ranked = np.arange(5000)
    rules = Passing(np.arange(180, 5000))
    assert sqlite_index._permitted(None, ranked, 200, rules).tolist() == list(range(180, 380))
    assert rules.listed == 0
