"""Counters of use on both databases: added to by many, never lost, and what is derived from them and from what is stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.catalogue import holdings
from storage.catalogue.engine import Catalogue, open_catalogue
from storage.catalogue.facts import StoredChunk, facts_of, page_of, stored_chunks
from storage.catalogue.holdings import Holding
from storage.catalogue.schema import ChunkRow, Corpus, Document, DocumentUse, KVObject, Tenant, UsageDay
from storage.catalogue.usage import add_usage, add_uses, forget_uses


@pytest.fixture
def catalogue(catalogue_url: str) -> Iterator[Catalogue]:
    made = open_catalogue(catalogue_url)
    with made.write() as session:
        session.add(Tenant(id="t", name="t", created_at=0.0))
        session.flush()
        for corpus in ("one", "two"):
            session.add(
                Corpus(
                    id=f"vs_{corpus}", tenant_id="t", name=corpus, sharing_group="t", source=None, attributes={},
                    created_at=0.0, last_active_at=0.0,
                )
            )  # fmt: skip
    yield made
    made.close()


def document(session: Session, name: str, corpus: str, keys: list[str | None], **values: object) -> None:
    session.add(
        Document(
            id=name, corpus_id=corpus, tenant_id="t", file_id="f", path=name, sha256="s", status="completed", access=None,
            attributes={}, created_at=1.0, **values,
        )
    )  # fmt: skip
    session.flush()
    for number, key in enumerate(keys):
        session.add(
            ChunkRow(
                document_id=name, corpus_id=corpus, tenant_id="t", ordinal=number, text="x", token_ids=b"", start=0, end=1,
                headings=[], page_start=None, page_end=None, line_start=1, line_end=1, kv_key=key,
            )
        )  # fmt: skip


def stored(session: Session, key: str, size: int, status: str = "done") -> None:
    session.add(
        KVObject(key=key, tenant_id="t", sharing_group="t", status=status, tokens=1, bytes=size, created_at=1.0, attempt=0)
    )


def test_many_writers_add_up(catalogue: Catalogue) -> None:
    def add(number: int) -> None:
        for n in range(10):
            with catalogue.write() as session:
                places = [(n % 2, "t", "vs_one"), (n % 2, "t", f"vs_{number % 2}")]
                add_usage(session, {place: {"answers": 1, "seconds_compiled": 0.5} for place in places})
                add_uses(session, {("d", 1): (1, float(n)), (f"d{number}", 2): (1, 1.0)})

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with catalogue.read() as session:
        rows = {(row.day, row.corpus_id): (row.answers, row.seconds_compiled) for row in session.scalars(select(UsageDay))}
        use = session.get_one(DocumentUse, ("d", 1))
    assert rows[0, "vs_one"] == (20, 10.0)
    assert sum(answers for answers, _ in rows.values()) == 80
    assert (use.hits, use.last_at) == (40, 9.0)


def test_old_uses_are_forgotten_but_the_last_and_those_of_deleted_documents_at_once(catalogue: Catalogue) -> None:
    with catalogue.write() as session:
        document(session, "a", "vs_one", [])
        document(session, "b", "vs_one", [])
        add_uses(session, {("a", 1): (2, 5.0), ("a", 200): (1, 9.0), ("b", 1): (1, 1.0), ("gone", 200): (1, 1.0)})
        forget_uses(session, 100)
        rows = session.execute(select(DocumentUse.document_id, DocumentUse.day)).all()
        facts = {each.document_id: each for each in facts_of(session, page_of(session, ["vs_one"], ""), with_use=True)}
    assert sorted(tuple(row) for row in rows) == [("a", 200), ("b", 1)]
    assert (facts["a"].used_at, facts["a"].hits) == (9.0, ((200, 1),))


def test_what_is_stored_is_counted_once_in_each_corpus(catalogue: Catalogue) -> None:
    with catalogue.write() as session:
        for key, size, status in (("k1", 100, "done"), ("k2", 20, "done"), ("k3", 3, "pending"), ("k4", 4, "purge")):
            stored(session, key, size, status)
        document(session, "a", "vs_one", ["k1", "k2", "k1", "k3", None])
        document(session, "b", "vs_one", ["k1"])
        document(session, "c", "vs_two", ["k1"], codec="raw")
        document(session, "d", "vs_two", [None], not_stored="secret")
    with catalogue.read() as session:
        assert holdings.stored(session) == {("t", "vs_one"): Holding(2, 120), ("t", "vs_two"): Holding(1, 100)}
        assert holdings.stored(session, ChunkRow.corpus_id == "vs_two") == {("t", "vs_two"): Holding(1, 100)}
        assert holdings.of_keys(session, {"k2", "k3", "unknown"}) == {("t", "vs_one"): Holding(1, 20)}
        assert holdings.kept_out(session) == {"vs_two": {"secret": 1}}
        assert stored_chunks(session, ["k2", "unknown"]) == {"k2": StoredChunk(None, 1, 20, 1.0)}


def test_speed_is_what_was_compiled_over_how_long_it_took(catalogue: Catalogue) -> None:
    with catalogue.read() as session:
        assert holdings.prefill_speed(session) is None
    with catalogue.write() as session:
        add_usage(session, {(1, "t", "vs_one"): {"tokens_compiled": 900, "seconds_compiled": 2.0}})
        add_usage(session, {(2, "t", "vs_two"): {"tokens_compiled": 100, "seconds_compiled": 2.0, "tokens_reused": 5}})
    with catalogue.read() as session:
        assert holdings.prefill_speed(session) == 250.0
        used = holdings.used(session, UsageDay.corpus_id == "vs_two")
    assert used["t", "vs_two"]["tokens_reused"] == 5
    assert used.keys() == {("t", "vs_two")}
