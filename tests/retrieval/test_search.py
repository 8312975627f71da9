"""Who finds what: fusion, rights, filters, budgets."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from small_library import Library
from sqlalchemy import text, update

from retrieval.relevance import EXACT
from retrieval.search import BESIDE, Retriever, fuse
from storage.catalogue.schema import Document
from storage.errors import UserError
from storage.types import RetrievedChunk

MODES = pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])


@MODES
def test_the_chunk_that_answers_comes_first(library, mode: str) -> None:
    library.put("vs_1", "travel", "Trains are booked in second class.")
    library.put("vs_1", "leave", "Parental leave lasts twenty weeks.")
    library.put("vs_1", "mix", "Trains run every twenty minutes, weeks on end.")
    assert library.find("how long is parental leave", mode=mode)[0] == "leave"


@MODES
def test_another_corpus_and_another_tenant_see_nothing_even_of_the_nearest(library, mode: str) -> None:
    library.corpus("vs_2")
    library.corpus("vs_other", "t2")
    library.put("vs_1", "mine", "nothing of the kind, but secret enough")
    library.put("vs_2", "second", "the secret code is swordfish")
    library.put("vs_other", "theirs", "the secret code is swordfish!")
    asked = "the secret code is swordfish"
    assert library.find(asked, mode=mode) == ["mine"]
    assert library.find(asked, "vs_1", "vs_2", mode=mode) == ["second", "mine"]
    assert library.find(asked, "vs_1", "vs_other", mode=mode) == ["mine"]
    assert library.find(asked, "vs_other", mode=mode) == []
    assert library.find(asked, "vs_1", tenant_id="t2", mode=mode) == []
    assert library.find(asked, "vs_other", tenant_id="t2", mode=mode) == ["theirs"]
    assert library.find(asked, "absent", mode=mode) == []


@MODES
def test_a_document_with_an_access_list_is_for_those_on_it(library, mode: str) -> None:
    library.put("vs_1", "closed", "salary bands of the board", access=["group:hr", "ann"])
    library.put("vs_1", "nobody", "salary bands of the board, draft", access=[])
    library.put("vs_1", "open", "salary bands are secret")
    asked = "salary bands of the board"
    assert library.find(asked, mode=mode) == ["open"]
    assert library.find(asked, mode=mode, principals=["bob", "group:h"]) == ["open"]
    assert library.find(asked, mode=mode, principals=["ann"]) == ["closed", "open"]
    assert library.find(asked, mode=mode, principals={"group:hr"}, top_k=1) == ["closed"]


def test_rights_are_part_of_the_search_and_leave_no_hole_in_the_answer(library) -> None:
    for number in range(80):
        library.put("vs_1", f"closed{number}", "the budget of project x " + "very " * number, access=["ann"])
    library.put("vs_1", "open", "a word on the budget in other times, of another sort")
    for mode in ("dense", "lexical", "hybrid"):
        assert library.find("the budget of project x", top_k=1, mode=mode) == ["open"]


@MODES
def test_the_final_list_goes_by_the_rows_not_by_the_index(library, mode: str) -> None:
    """An index that answers too much, by a fault, shows nothing to anybody."""
    library.corpus("vs_other", "t2")
    (theirs,) = library.put("vs_other", "theirs", "zebra crossing")
    (closed,) = library.put("vs_1", "closed", "zebra stripes", access=["ann"])
    (mine,) = library.put("vs_1", "mine", "zebra foal")

    class Faulty:
        def dense(self, *_: object) -> list[tuple[int, float]]:
            return [(theirs, 0.9), (closed, 0.8), (10_000, 0.7), (mine, 0.6)]

        lexical = dense

    library.retriever = Retriever(library.catalogue, Faulty(), library.embedder)
    assert library.find("zebra", mode=mode) == ["mine"]
    assert library.find("zebra", "vs_1", "vs_other", mode=mode) == ["mine"]


def test_the_index_is_not_even_asked_about_another_tenants_corpus(library) -> None:
    library.corpus("vs_other", "t2")
    library.put("vs_1", "mine", "zebra")
    library.put("vs_other", "theirs", "zebra")
    asked: list[list[str]] = []

    class Spy:
        def dense(self, _session: object, corpus_ids: list[str], *_: object) -> list[tuple[int, float]]:
            asked.append(corpus_ids)
            return []

        lexical = dense

    library.retriever = Retriever(library.catalogue, Spy(), library.embedder)
    library.find("zebra", "vs_1", "vs_other")
    library.find("zebra", "vs_other")
    assert asked == [["vs_1"], ["vs_1"]]


def test_what_vanishes_during_a_search_is_replaced_by_what_came(
    library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.put("vs_1", "old", "fees are ten euros")
    ranked, changed = library.retriever._ranked, []

    def ranked_then_changed(*arguments: object) -> list[RetrievedChunk]:
        found = ranked(*arguments)
        if not changed:
            changed.append(True)
            library.drop("vs_1", "old")
            library.put("vs_1", "new", "fees are twelve euros")
        return found

    monkeypatch.setattr(library.retriever, "_ranked", ranked_then_changed)
    assert library.find("fees") == ["new"]


def test_access_closed_during_a_search_holds(library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.put("vs_1", "doc", "fees are ten euros")
    ranked = library.retriever._ranked

    def ranked_then_closed(*arguments: object) -> list[RetrievedChunk]:
        found = ranked(*arguments)
        with library.catalogue.write() as session:
            session.execute(update(Document).values(access=["ann"]))
        return found

    monkeypatch.setattr(library.retriever, "_ranked", ranked_then_closed)
    assert library.find("fees") == []


def test_attributes_filter_before_ranking(library) -> None:
    for number in range(70):
        library.put("vs_1", f"blue{number}", f"quarterly report {number}", team="blue", year=2000.0 + number)
    library.put("vs_1", "red", "a report, of sorts, each quarter or so", team="red", year=1990)
    library.put("vs_1", "none", "quarterly report")
    eq_red = {"type": "eq", "key": "team", "value": "red"}
    late = {"type": "gte", "key": "year", "value": 2069}
    assert library.find("quarterly report", filters=eq_red) == ["red"]
    either = {"type": "or", "filters": [eq_red, late]}
    assert sorted(library.find("quarterly report", filters=either)) == ["blue69", "red"]
    assert library.find("quarterly report", filters={"type": "and", "filters": [eq_red, late]}) == []
    not_blue = {"type": "ne", "key": "team", "value": "blue"}
    assert library.find("quarterly report", filters=not_blue) == ["none", "red"]


def test_a_token_budget_is_kept_and_used(library) -> None:
    library.put("vs_1", "large", "apple apple apple", tokens=17)
    library.put("vs_1", "small", "apple pie", tokens=5)
    library.put("vs_1", "tail", "apple tree and much else", tokens=6)
    assert library.find("apple apple apple")[0] == "large"
    assert library.find("apple apple apple", token_budget=11) == ["small", "tail"]
    assert library.find("apple apple apple", token_budget=22) == ["large", "small"]
    assert library.find("apple apple apple", token_budget=4) == []


def test_the_same_text_in_two_documents_is_given_once(library) -> None:
    for name in "abc":
        library.put("vs_1", name, "terms and conditions apply")
    for number in range(120):
        library.put("vs_1", f"copy{number}", "terms and conditions")
    library.put("vs_1", "other", "conditions on terms of trade")
    found = library.find("terms and conditions", top_k=3)
    assert (found[0][:4], found[1], found[2]) == ("copy", "a", "other")


def test_scores_are_between_nothing_and_one_and_the_threshold_cuts(library) -> None:
    library.put("vs_1", "exact", "harbour dues")
    library.put("vs_1", "near", "harbour master and a lot of other things")
    for mode in ("hybrid", "dense", "lexical"):
        found = library.retriever.search(
            tenant_id="t1", corpus_ids=["vs_1"], query="harbour dues", top_k=5, mode=mode
        )
        scores = [chunk.score for chunk in found]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] == pytest.approx(EXACT if mode == "lexical" else 1.0, abs=1e-5)
        assert library.find("harbour dues", mode=mode, score_threshold=(scores[0] + scores[1]) / 2) == [
            "exact"
        ]


def test_a_found_chunk_says_where_it_stands(library) -> None:
    (chunk_id,) = library.put("vs_1", "doc", "naïve 東京", team="blue", open=True)
    (chunk,) = library.retriever.search(tenant_id="t1", corpus_ids=["vs_1"], query="naïve", top_k=1)
    assert (chunk.chunk_id, chunk.path, chunk.text) == (chunk_id, "doc", "naïve 東京")
    assert chunk.token_ids == tuple(map(ord, "naïve 東京"))
    assert chunk.attributes == {"team": "blue", "open": True}
    assert (chunk.headings, chunk.page_start, chunk.line_end) == (("Top",), None, 2)


def test_a_repeated_query_is_embedded_once(library) -> None:
    library.put("vs_1", "doc", "text")
    before = library.embedder.calls
    for _ in range(3):
        library.find("text")
    assert library.embedder.calls == before + 1
    for number in range(300):
        library.retriever._vectors.get(str(number))
    assert len(library.retriever._vectors._vectors) == 256


@pytest.mark.parametrize(
    "options",
    [
        {"query": " "},
        {"top_k": 0},
        {"top_k": 501},
        {"token_budget": 0},
        {"mode": "magic"},
        {"filters": {"a": 1}},
    ],
)
def test_a_search_that_makes_no_sense_is_refused(library, options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        library.find(**({"query": "x"} | options))


def test_fusion_prefers_what_both_lists_hold() -> None:
    assert [hit for hit, _ in fuse([[(1, 9.0), (2, 8.0)], [(3, 5.0), (2, 4.0)]])] == [2, 1, 3]
    assert fuse([[(7, 0.1)], [(7, 99.0)]]) == [(7, 1.0)]


def test_a_search_needs_no_write_lock(library) -> None:
    library.put("vs_1", "doc", "text")
    with library.catalogue.write() as session:
        session.execute(text("UPDATE document SET path = 'changed'"))
        assert library.find("text") == ["doc"]


def test_more_searches_at_once_than_there_are_connections_all_answer(library: Library) -> None:
    """A search uses two connections if it can, and waits for no second one while it holds the first."""
    library.put("vs_1", "a", "zebra crossing")
    pool = library.catalogue.engine.pool
    pool._pool.maxsize, pool._max_overflow, pool._timeout = 2, BESIDE - 1, 5.0
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda n: library.find(f"zebra {n}"), range(64)))
    assert found == [["a"]] * 64


def test_a_search_that_fails_leaves_no_connection_in_use(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.put("vs_1", "doc", "Trains are booked in second class.")
    begun, by_words = threading.Event(), library.index.lexical

    def slowly(*asked: Any) -> Any:
        begun.set()
        time.sleep(0.3)
        return by_words(*asked)

    def failing(_: object) -> Any:
        assert begun.wait(20)
        raise UserError("the encoder is gone")

    monkeypatch.setattr(library.index, "lexical", slowly)
    monkeypatch.setattr(library.embedder, "embed", failing)
    with pytest.raises(UserError, match="encoder"):
        library.find("a train nobody asked about before", mode="hybrid")
    assert library.catalogue.engine.pool.checkedout() == 0


@MODES
def test_no_connection_is_held_while_the_encoder_works(library: Library, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be busy with an ingest for as long as a batch takes."""
    library.put("vs_1", "a", "zebra crossing")
    held: list[int] = []
    embed = library.embedder.embed

    def watched(texts: list[str]) -> list[list[float]]:
        held.append(library.catalogue.engine.pool.checkedout())
        return embed(texts)

    monkeypatch.setattr(library.embedder, "embed", watched)
    monkeypatch.setattr(library.retriever, "_words_beside", lambda _: None)  # which holds one, and waits for nothing
    assert library.find("zebra", mode=mode) == ["a"]
    assert held == ([] if mode == "lexical" else [0])


def test_a_fault_of_the_search_by_words_is_the_searchs_fault_and_leaves_its_thread_free(library: Library) -> None:
    library.put("vs_1", "a", "zebra crossing")
    real = library.index.lexical
    library.index.lexical = lambda *_: (_ for _ in ()).throw(UserError("no"))
    for _ in range(2 * BESIDE):
        with pytest.raises(UserError, match="no"):
            library.find("zebra")
    library.index.lexical = real
    assert library.find("zebra") == ["a"]
    assert library.retriever._free._value == BESIDE
