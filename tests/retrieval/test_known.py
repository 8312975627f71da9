"""Stored chunks found in text that somebody sends, within the asker's rights; on both databases."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_library import Library
from sqlalchemy import select

from retrieval import known
from retrieval.known import KnownText
from storage.anchors import EDGE, SHORTEST, STRETCH, WINDOWS, anchors_of, candidates
from storage.catalogue.schema import ChunkRow

LONG = 3 * SHORTEST


def prose(seed: int, length: int = LONG) -> str:
    return "".join(random.Random(seed).choices("abcdefghij klmnopqrstuvwxyz", k=length))


def find(library: Library, text: str, tenant: str = "t1", corpora: set[str] | None = None, key: str = "") -> list[str]:
    """Documents found in the text; a token is a character."""
    known_text = KnownText(library.catalogue, lambda text: [ord(c) for c in text])
    chunks = known_text.find([text], tenant_id=tenant, corpora=corpora, principals={key} if key else ())
    return sorted(chunk.document_id.removeprefix("doc-") for chunk in chunks)


def test_a_chunk_is_found_wherever_it_stands(library: Library) -> None:
    library.put("vs_1", "a", prose(1), prose(2))
    library.put("vs_1", "b", prose(3))
    assert find(library, prose(3)) == ["vs_1-b"]
    assert find(library, f"Look: {prose(3)} and {prose(2)}.") == ["vs_1-a", "vs_1-b"]
    assert find(library, prose(4)) == []


def test_either_end_is_enough(library: Library) -> None:
    library.put("vs_1", "a", prose(1))
    assert find(library, "Begins: " + prose(1)[:SHORTEST]) == ["vs_1-a"]
    assert find(library, prose(1)[-SHORTEST:] + " ends.") == ["vs_1-a"]
    assert find(library, prose(1)[EDGE + 1 :][: STRETCH - 1]) == []


def test_another_tenants_chunks_are_never_found(library: Library) -> None:
    library.corpus("vs_2", "t2")
    library.put("vs_2", "a", prose(1))
    assert find(library, prose(1)) == []
    assert find(library, prose(1), corpora={"vs_2"}) == []
    assert find(library, prose(1), tenant="t2") == ["vs_2-a"]


def test_a_restricted_key_finds_in_its_corpora_alone(library: Library) -> None:
    library.corpus("vs_3")
    library.put("vs_3", "a", prose(1))
    assert find(library, prose(1), corpora={"vs_1"}) == []
    assert find(library, prose(1), corpora=set()) == []
    assert find(library, prose(1), corpora={"vs_1", "vs_3"}) == ["vs_3-a"]


def test_access_lists_are_kept(library: Library) -> None:
    library.put("vs_1", "a", prose(1), access=["key-1"])
    assert find(library, prose(1)) == []
    assert find(library, prose(1), key="key-2") == []
    assert find(library, prose(1), key="key-1") == ["vs_1-a"]


def test_a_deleted_chunk_is_gone_at_once(library: Library) -> None:
    library.put("vs_1", "a", prose(1))
    library.drop("vs_1", "a")
    assert find(library, prose(1)) == []


def test_closed_documents_with_the_same_text_crowd_out_none(library: Library) -> None:
    for number in range(2 * known.ALIKE):
        library.put("vs_1", f"closed-{number:02}", prose(1), access=["key-1"])
    library.put("vs_1", "open", prose(1))
    assert find(library, prose(1)) == ["vs_1-open"]


def test_many_chunks_that_begin_alike_do_not_hide_the_one_that_is_whole(library: Library) -> None:
    """A licence header stands at the top of every file."""
    header = prose(0)
    for number in range(3 * known.ALIKE):
        library.put("vs_1", f"{number:02}", header + prose(100 + number))
    found = find(library, header + prose(100 + 2 * known.ALIKE + 3))
    assert f"vs_1-{2 * known.ALIKE + 3:02}" in found
    assert len(found) <= 2 * known.ALIKE


def test_what_is_looked_at_is_bounded_by_the_texts_length(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "TOKENS_PER_CHUNK", LONG)
    for number in range(6):
        library.put("vs_1", str(number), prose(1))
    assert len(find(library, prose(1))) == 2


def test_chunks_that_are_too_short_have_no_anchors(library: Library) -> None:
    library.put("vs_1", "a", prose(1, SHORTEST - 1), prose(2, SHORTEST))
    with library.catalogue.read() as session:
        rows = session.scalars(select(ChunkRow).order_by(ChunkRow.id)).all()
        assert [(row.head is None, row.tail is None) for row in rows] == [(True, True), (False, False)]


TOKENS = st.lists(st.integers(0, 60_000) | st.integers(0, 2), min_size=SHORTEST, max_size=200)
AROUND = st.lists(st.integers(0, 60_000) | st.integers(0, 2), max_size=120)


@given(TOKENS, AROUND, AROUND)
def test_a_text_that_holds_a_chunk_has_its_anchors(chunk: list[int], before: list[int], after: list[int]) -> None:
    """Also where its first and last tokens are others."""
    both = anchors_of(chunk)
    assert both is not None
    assert set(both) <= candidates(before + chunk + after)
    assert set(both) <= candidates(before + [7] * EDGE + chunk[EDGE:-EDGE] + [8] * EDGE + after)


def test_a_text_has_few_candidates() -> None:
    tokens = random.Random(5).choices(range(50_000), k=20_000)
    assert len(candidates(tokens)) < 2.5 * len(tokens) / WINDOWS
    assert candidates(tokens[: STRETCH - 1]) == set()
    assert len(candidates(tokens[:STRETCH])) == 1
    assert len(candidates([5] * 10_000)) == 1
