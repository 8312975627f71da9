"""A corpus as of a time: exactly what was current then, until it has been kept for long enough or somebody deletes it."""

from __future__ import annotations

import io
import itertools
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from fixtures_work import WordEmbedder, Work, open_work, paragraphs
from sqlalchemy import select, text, update

from ingest import versions
from ingest.files import drop_source_files
from ingest.versions import Expiry, Keeping
from retrieval.search import Retriever
from storage.catalogue.schema import ChunkRow, Corpus, Document, DocumentVersion, File, KVObject, VersionChunk
from storage.errors import UserError

DAY = 86400.0


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def either(request: pytest.FixtureRequest, work: Work, tmp_path: Path):
    if request.param == "sqlite":
        yield work
        return
    made = open_work(tmp_path, request.getfixturevalue("postgres_catalogue"))
    yield made
    made.catalogue.close()


def keeping(work: Work, said: str | int = "30d", **values: Any) -> Corpus:
    corpus = work.corpus(**values)
    with work.catalogue.write() as session:
        row = session.get_one(Corpus, corpus.id)
        row.settings, row.versions_from = {"keep_versions": said}, time.time()
    return corpus


def put(work: Work, corpus: Corpus, files: dict[str, str]) -> float:
    """Ingest these, and a moment at which they are current."""
    work.ingest(corpus, dict(files))
    work.compute_kv()
    time.sleep(0.01)
    return time.time()


def found(work: Work, corpus: Corpus, as_of: float | None, query: str = "limit", **options: Any) -> list[str]:
    """What either index finds, sorted."""
    retriever = Retriever(work.catalogue, work.index.real, WordEmbedder())
    ask: dict[str, Any] = {"tenant_id": "t1", "corpus_ids": [corpus.id], "query": query, "top_k": 50, "as_of": as_of}
    lists = [retriever.search(**ask, mode=mode, **options) for mode in ("dense", "lexical", "hybrid")]
    texts = [sorted(chunk.text for chunk in chunks) for chunks in lists]
    assert texts[1] == [t for t in texts[0] if query in t], "both indexes see the same generation"
    assert texts[2] == texts[0]
    return texts[0]


def delete_by_sync(work: Work, corpus: Corpus, path: str) -> None:
    from ingest.jobs import JobItem, create_job

    document = work.document(corpus, path)
    assert document is not None
    with work.catalogue.write() as session:
        items = [JobItem(path, document.id, document.file_id, "delete")]
        create_job(session, tenant_id="t1", corpus_id=corpus.id, type="sync", items=items)
    work.worker().drain()
    time.sleep(0.01)


def expire(work: Work, now: float) -> int:
    def clean(tenant: str, ids: Any) -> None:
        drop_source_files(work.catalogue, work.objects, tenant, ids)

    return Expiry(work.catalogue, lambda: work.index, clean).tick(now)


def test_each_time_sees_the_generation_that_was_current_and_no_other(either: Work) -> None:
    corpus = keeping(either)
    times = [put(either, corpus, {"a.txt": f"limit {n}", **({"b.txt": "limit of b"} if n else {})}) for n in range(3)]
    assert found(either, corpus, times[0]) == ["limit 0"]
    assert found(either, corpus, times[1]) == ["limit 1", "limit of b"]
    assert found(either, corpus, times[2]) == ["limit 2", "limit of b"]
    assert found(either, corpus, None) == ["limit 2", "limit of b"]
    assert found(either, corpus, time.time() + DAY) == ["limit 2", "limit of b"]
    with either.catalogue.read() as session:
        spans = sorted(session.execute(select(DocumentVersion.valid_from, DocumentVersion.valid_to)).all())
        now = session.scalar(select(Document.current_since).where(Document.path == "a.txt"))
    ends = [*itertools.chain.from_iterable(spans), now]
    assert ends == sorted(ends)
    assert (ends[1], ends[3]) == (ends[2], ends[4]), "where one ends the next begins"


def test_the_instant_of_a_change_belongs_to_one_generation(either: Work) -> None:
    corpus = keeping(either)
    put(either, corpus, {"a.txt": "limit old"})
    put(either, corpus, {"a.txt": "limit new"})
    with either.catalogue.read() as session:
        change = session.scalars(select(DocumentVersion.valid_to)).one()
    assert found(either, corpus, change) == ["limit new"]
    assert found(either, corpus, change - 1e-6) == ["limit old"]


def test_what_a_sync_deleted_is_found_as_of_before_and_not_now(either: Work) -> None:
    corpus = keeping(either)
    before = put(either, corpus, {"a.txt": "limit a", "b.txt": "limit b"})
    delete_by_sync(either, corpus, "a.txt")
    assert found(either, corpus, before) == ["limit a", "limit b"]
    assert found(either, corpus, None) == found(either, corpus, time.time()) == ["limit b"]


def test_without_the_setting_nothing_is_kept_and_a_time_is_refused(work: Work) -> None:
    corpus = work.corpus()
    before = put(work, corpus, {"a.txt": "limit old"})
    put(work, corpus, {"a.txt": "limit new"})
    assert work.count(DocumentVersion) == work.count(VersionChunk) == 0
    with pytest.raises(UserError, match="keep_versions"):
        found(work, corpus, before)


def test_a_time_before_versions_were_kept_is_refused_not_half_answered(work: Work) -> None:
    early = work.corpus()
    before = put(work, early, {"a.txt": "limit old"})
    with work.catalogue.write() as session:
        row = session.get_one(Corpus, early.id)
        row.settings, row.versions_from = {"keep_versions": 3}, time.time()
    with pytest.raises(UserError, match="and later"):
        found(work, early, before)


@pytest.mark.parametrize("how", ["document", "corpus", "archive"])
def test_an_explicit_delete_takes_all_kept_generations_at_once(work: Work, how: str) -> None:
    corpus = keeping(work)
    path = "a.zip!/in/a.txt" if how == "archive" else "a.txt"
    moments = [put(work, corpus, {path: f"limit {n}", "a.zip": f"no limit {n}"}) for n in range(3)]
    document = work.document(corpus, "a.zip" if how == "archive" else "a.txt")
    assert document is not None
    delete_by_sync(work, corpus, path)
    put(work, corpus, {path: "limit again"})  # another document at the same path
    if how == "corpus":
        receipt = work.deleter.corpus("t1", corpus.id, raw=True)
        assert (receipt["documents"], receipt["versions"], receipt["chunks"]) == (2, 5, 7)
        assert list(work.objects.list("raw/")) == []
        assert work.count(KVObject) == 0
    else:
        again = work.document(corpus, path)
        assert again is not None
        receipt = work.deleter.document("t1", document.id if how == "archive" else again.id, raw=True)
        assert receipt["versions"] == (5 if how == "archive" else 3)
        for moment in moments:
            assert all(text.startswith("no limit") for text in found(work, corpus, moment))
    with work.catalogue.read() as session:
        generation = work.index.real.generations.name
        vectors = session.scalar(text(f"SELECT count(*) FROM index_vector_{generation}"))
        indexed = session.scalar(text(f"SELECT count(*) FROM index_words_{generation}"))
    assert vectors == indexed == work.count(ChunkRow) + work.count(VersionChunk)


def test_kept_kv_is_not_deleted_and_a_deletion_lets_go_of_it(work: Work) -> None:
    corpus = keeping(work)
    before = put(work, corpus, {"a.txt": "limit old"})
    put(work, corpus, {"a.txt": "limit new"})
    assert work.deleted == []
    retriever = Retriever(work.catalogue, work.index.real, WordEmbedder())
    [chunk] = retriever.search(tenant_id="t1", corpus_ids=[corpus.id], query="limit", top_k=5, as_of=before)
    assert work.count(KVObject, KVObject.key == chunk.kv_key, KVObject.status == "done") == 1
    assert (chunk.text, chunk.chunk_id < 0) == ("limit old", True)
    document = work.document(corpus, "a.txt")
    assert document is not None
    work.deleter.document("t1", document.id)
    assert chunk.kv_key in work.deleted
    assert work.count(KVObject) == 0


def test_what_has_been_kept_for_long_enough_is_forgotten_with_its_file_and_kv(work: Work) -> None:
    corpus = keeping(work, "2d")
    times = [put(work, corpus, {"a.txt": "limit 0"})]
    with work.catalogue.write() as session:
        session.execute(update(File).values(purpose="source"))
    times.append(put(work, corpus, {"a.txt": "limit 1"}))
    assert work.count(File) == 2, "what a source had brought stays while a kept generation was read from it"
    assert expire(work, time.time() + 1.9 * DAY) == 0
    assert found(work, corpus, times[0]) == ["limit 0"]
    assert expire(work, time.time() + 2.1 * DAY) == 1
    with pytest.raises(UserError, match="and later"):
        found(work, corpus, times[0])
    assert found(work, corpus, times[1]) == ["limit 1"]
    assert work.count(KVObject, KVObject.status == "purge") == 1
    assert work.count(File) == 1


def test_a_number_of_generations_is_kept_of_each_document(work: Work) -> None:
    corpus = keeping(work, 2)
    times = [put(work, corpus, {"a.txt": f"limit {n}"} | ({} if n else {"b.txt": "limit b"})) for n in range(5)]
    put(work, corpus, {"b.txt": "limit b2"})
    assert expire(work, time.time()) == 2
    assert found(work, corpus, times[2]) == ["limit 2", "limit b"]
    with pytest.raises(UserError):
        found(work, corpus, times[1])
    with work.catalogue.write() as session:
        row = session.get_one(Corpus, corpus.id)
        row.settings, row.versions_from = {"keep_versions": 0}, None
    assert expire(work, time.time()) == 3
    assert work.count(VersionChunk) == 0


def test_who_may_not_see_a_document_sees_none_of_its_generations(either: Work) -> None:
    corpus = keeping(either)
    before = put(either, corpus, {"a.txt": "limit old", "gone.txt": "limit gone"})
    put(either, corpus, {"a.txt": "limit new"})
    with either.catalogue.write() as session:
        session.execute(update(Document).values(access=["key-1"]))
    delete_by_sync(either, corpus, "gone.txt")
    assert found(either, corpus, before) == []
    assert found(either, corpus, before, principals=["key-1"]) == ["limit gone", "limit old"]


def test_filters_and_duplicates_hold_for_kept_generations(either: Work) -> None:
    corpus = keeping(either)
    put(either, corpus, {"a.txt": "limit old", "b.txt": "limit old"})
    with either.catalogue.write() as session:
        session.execute(update(Document).where(Document.path == "b.txt").values(attributes={"team": "blue"}))
    before = time.time()
    put(either, corpus, {"a.txt": paragraphs(3), "b.txt": paragraphs(2)})
    assert found(either, corpus, before) == ["limit old"]
    blue = {"type": "eq", "key": "team", "value": "blue"}
    assert found(either, corpus, before, filters=blue) == ["limit old"]
    assert found(either, corpus, before, filters={**blue, "value": "red"}) == []


@pytest.mark.parametrize("said", ["30", "d", "-1d", "0d", "1w", -1, 1001, "1d\n"])
def test_a_keeping_that_means_nothing_is_refused(said: str | int) -> None:
    with pytest.raises(UserError):
        Keeping.of(said)
    assert Keeping.of("30d") == Keeping(seconds=30 * DAY)
    assert Keeping.of(0) is Keeping.of("") is Keeping.of(None) is None
    assert versions.Keeping.of(3) == Keeping(count=3)


def test_a_search_as_of_now_meets_nothing_that_is_kept(work: Work) -> None:
    """By construction: the statements of a search that names no time know no table of kept generations."""
    from sqlalchemy import event

    corpus = keeping(work)
    for n in range(3):
        put(work, corpus, {"a.txt": f"limit {n}"})
    statements: list[str] = []
    event.listen(work.catalogue.engine, "before_cursor_execute", lambda c, cur, sql, *rest: statements.append(sql))
    assert found(work, corpus, None) == ["limit 2"]
    assert statements
    assert not any("version" in sql.replace("versions_from", "") for sql in statements)


def test_older_generations_stay_closed_when_the_document_was_closed_and_then_deleted(work: Work) -> None:
    corpus = keeping(work)
    then = put(work, corpus, {"a.txt": "limit secret"})
    put(work, corpus, {"a.txt": "limit other"})
    with work.catalogue.write() as session:
        session.execute(update(Document).values(access=["ann"]))
    delete_by_sync(work, corpus, "a.txt")
    assert found(work, corpus, then) == []
    assert found(work, corpus, then, principals={"ann"}) == ["limit secret"]


@pytest.mark.slow
def test_an_archive_of_many_files_can_be_deleted(work: Work) -> None:
    corpus = work.corpus()
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w") as archive:
        for n in range(1100):
            archive.writestr(f"{n}.txt", f"file {n}")
    work.ingest(corpus, {"a.zip": inside.getvalue()})
    document = work.document(corpus, "a.zip")
    assert document is not None
    assert work.deleter.document("t1", document.id, raw=True)["documents"] == 1101


def test_a_document_that_an_archive_replaces_is_kept(work: Work) -> None:
    corpus = keeping(work)
    then = put(work, corpus, {"a.zip": "limit 10"})
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w") as archive:
        archive.writestr("b.txt", "limit 20")
    work.ingest(corpus, {"a.zip": inside.getvalue()})
    assert found(work, corpus, then) == ["limit 10"]
    assert found(work, corpus, None) == ["limit 20"]
