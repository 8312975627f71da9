"""Chunks beside those found, and the order in which a prompt has them."""

from __future__ import annotations

from dataclasses import replace

from fixtures_models import retrieved
from small_library import Library
from sqlalchemy import update

from retrieval.neighbours import in_reading_order
from storage.catalogue.schema import ChunkRow

TEXTS = ("before all", "one before", "the needle in it", "one behind", "behind all")


def found(library: Library, budget: int, **options: object) -> list[str]:
    chunks = library.retriever.search(
        tenant_id="t1", corpus_ids=["vs_1"], query="needle", top_k=1, token_budget=budget, neighbours=True, **options
    )
    return [chunk.text for chunk in chunks]


def test_what_is_left_of_the_budget_goes_to_what_stands_beside(library: Library) -> None:
    library.put("vs_1", "doc", *TEXTS, tokens=10)
    assert found(library, 10) == ["the needle in it"]
    assert found(library, 25) == ["the needle in it", "one behind"]
    assert found(library, 500) == ["the needle in it", "one behind", "one before"]


def test_the_neighbours_stand_in_the_same_section_of_the_same_document(library: Library) -> None:
    ids = library.put("vs_1", "doc", *TEXTS, tokens=10)
    library.put("vs_1", "other", "first", "second", "third", "fourth", tokens=10)
    with library.catalogue.write() as session:
        session.execute(update(ChunkRow).where(ChunkRow.id == ids[3]).values(headings=["Another"]))
    assert found(library, 500) == ["the needle in it", "one before"]


def test_the_parts_of_a_long_function_are_neighbours_though_only_later_ones_are_called_by_its_name(library: Library) -> None:
    ids = library.put("vs_1", "doc", *TEXTS, tokens=10)
    with library.catalogue.write() as session:
        inside = {"headings": ["Top", "settle"], "header": "def settle(amount):"}
        session.execute(update(ChunkRow).where(ChunkRow.id == ids[2]).values(**inside))
        session.execute(update(ChunkRow).where(ChunkRow.id == ids[3]).values(headings=["Top", "Section"]))
    assert found(library, 500) == ["the needle in it", "one before"]
    with library.catalogue.write() as session:
        session.execute(update(ChunkRow).where(ChunkRow.id == ids[3]).values(headings=["Top", "close"], header="def close():"))
    assert found(library, 500) == ["the needle in it", "one behind", "one before"]


def test_a_neighbour_that_was_replaced_meanwhile_is_not_given(library: Library, monkeypatch) -> None:
    library.put("vs_1", "doc", *TEXTS, tokens=10)
    ranked = library.retriever._ranked

    def ranked_then_dropped(*arguments: object) -> list:
        chunks = ranked(*arguments)
        library.drop("vs_1", "doc") if chunks else None
        return chunks

    monkeypatch.setattr(library.retriever, "_ranked", ranked_then_dropped)
    assert found(library, 500) == []


def test_a_prompt_has_what_follows_one_another_in_the_order_of_its_document() -> None:
    def at(document: str, ordinal: int) -> object:
        return replace(retrieved(100 * ord(document) + ordinal, [1]), document_id=document, ordinal=ordinal)

    ranking = [at("b", 4), at("a", 7), at("b", 9), at("b", 3), at("a", 5), at("b", 5), at("a", 8)]
    placed = [(chunk.document_id, chunk.ordinal) for chunk in in_reading_order(ranking)]
    assert placed == [("b", 3), ("b", 4), ("b", 5), ("a", 7), ("a", 8), ("b", 9), ("a", 5)]
    assert in_reading_order([]) == []
