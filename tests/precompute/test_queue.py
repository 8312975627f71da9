"""The KV queue: owed rows become stored objects, each once, whatever dies on the way."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fixtures_work import Work, key_of, paragraphs
from sqlalchemy import select, update

from ingest.jobs import cancel, settle
from ingest.purge import sweep
from ingest.recompute import queue_recompute
from precompute import rows
from precompute.compiling import OwnCompiler
from precompute.queue import RETRY_DELAY, KVQueue
from precompute.types import Elsewhere
from storage.catalogue.schema import ChunkRow, Corpus, Document, KVObject
from storage.conditioning import Reading, readings
from storage.errors import Stopping, StorageUnavailable
from storage.kvstore import KVStore
from storage.types import KVProfile, KVRecord, Miss

PROFILE = KVProfile(
    model="tiny", weights="w", tokenizer="t", frame="f", conditioning="none", codec="raw", dtype="float32",
    layers=2, kv_heads=1, head_dim=4,
)  # fmt: skip


class TinyReader:
    """KV made of the token ids themselves. A token id of `poison` makes the whole batch fail, as a real
    model would."""

    profile = PROFILE

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []
        self.readings: list[Reading] = []
        self.batched: list[list[Reading]] = []
        self.poison: int | None = None

    def stored_as(self, codec: str | None) -> KVProfile:
        return PROFILE if codec is None else replace(PROFILE, codec=codec)

    def compile_readings(self, readings: Sequence[Reading]) -> list[torch.Tensor]:
        batch = [read[-1] for read in readings]
        self.batches.append(batch)
        self.readings += readings
        self.batched.append(list(readings))
        if any(self.poison in ids for ids in batch):
            raise RuntimeError("poison")
        # What was read before a chunk shows in every number of its KV.
        return [
            (torch.tensor(ids, dtype=torch.float32) + len(read) - 1).view(1, 1, 1, -1, 1).expand(2, 2, 1, -1, 4)
            for read, ids in zip(readings, batch, strict=True)
        ]

    @property
    def compiled(self) -> int:
        return sum(len(batch) for batch in self.batches)


class Broken:
    """A store that fails as told, and is a KVStore otherwise."""

    def __init__(self, store: KVStore, error: Exception | None = None) -> None:
        self.store = store
        self.error = error
        self.puts = 0
        self.before_put: Any = lambda: None

    def put(self, record: KVRecord) -> int:
        self.puts += 1
        self.before_put()
        if self.error is not None:
            raise self.error
        return self.store.put(record)


@pytest.fixture
def reader() -> TinyReader:
    return TinyReader()


@pytest.fixture
def store(work: Work) -> KVStore:
    return KVStore(work.objects)


def repair(work: Work, key: str) -> bool:
    with work.catalogue.write() as session:
        return rows.request_repair(session, key)


def one_batch(queue: KVQueue) -> int:
    """One batch computed and stored; the number of rows that were tried."""
    stops = iter([False, True])
    return queue.drain(stop=lambda: next(stops, True))


def make_queue(work: Work, store: Any, reader: TinyReader, owner: str = "kv1", **options: Any) -> KVQueue:
    def settled(job_ids: set[str]) -> None:
        with work.catalogue.write() as session:
            for job_id in job_ids:
                settle(session, job_id)

    return KVQueue(
        work.catalogue, OwnCompiler(reader, store), owner, settled=settled, **{"kv_keys": work.pipeline.kv_keys, **options}
    )


def statuses(work: Work) -> list[str]:
    with work.catalogue.read() as session:
        return sorted(session.scalars(select(KVObject.status)))


def test_what_is_owed_is_stored_and_the_job_ends(work: Work, store: KVStore, reader: TinyReader) -> None:
    job = work.ingest(work.corpus(), {"a.txt": paragraphs(5)})
    queue = make_queue(work, store, reader)
    assert queue.drain() == 5
    shown = work.view(job)
    assert shown["status"] == "completed"
    progress = shown["progress"]
    assert (progress["chunks_total"], progress["chunks_computed"], progress["chunks_reused"]) == (5, 5, 0)
    with work.catalogue.read() as session:
        stored = session.scalars(select(KVObject)).all()
    assert progress["kv_bytes_written"] == sum(row.bytes for row in stored) > 0
    for row in stored:
        record = store.get(row.key, PROFILE)
        assert isinstance(record, KVRecord)
        assert key_of(record.token_ids, "t1") == row.key
        assert record.kv[0, 0, 0, :, 0].tolist() == pytest.approx([float(i) for i in record.token_ids])
    assert queue.throughput.tokens == sum(row.tokens for row in stored)
    assert queue.throughput.tokens_per_second > 0


def test_batches_keep_to_their_size_but_a_long_chunk_still_passes(
    work: Work, store: KVStore, reader: TinyReader
) -> None:
    work.ingest(work.corpus(), {"a.txt": paragraphs(5)})
    assert make_queue(work, store, reader, batch_tokens=30).drain() == 5
    assert [len(batch) for batch in reader.batches] == [2, 2, 1]
    work.ingest(work.corpus("d"), {"b.txt": paragraphs(2, tag="q")})
    assert make_queue(work, store, reader, batch_tokens=1).drain() == 2


def test_one_poison_chunk_fails_only_itself_and_after_three_attempts(
    work: Work, store: KVStore, reader: TinyReader
) -> None:
    job = work.ingest(work.corpus(), {"a.txt": paragraphs(4)})
    with work.catalogue.write() as session:
        batch = rows.claim(session, "look", 60, 10**6, None)
        assert batch is not None
        rows.give_back(session, batch, [r.key for r in batch.rows], blame=False, max_attempts=3)
    reader.poison = batch.rows[1].token_ids[0]
    make_queue(work, store, reader).drain()
    assert statuses(work) == ["done", "done", "done", "failed"]
    assert sum(1 for b in reader.batches if len(b) == 1 and reader.poison in b[0]) == 3
    shown = work.view(job)
    assert shown["status"] == "completed_with_errors"
    assert shown["errors"][0]["code"] == "kv_failed"
    assert shown["progress"]["chunks_computed"] == 3


def test_a_store_that_is_down_is_waited_for_however_long(
    work: Work, store: KVStore, reader: TinyReader
) -> None:
    job = work.ingest(work.corpus(), {"a.txt": paragraphs(3)})
    broken = Broken(store, StorageUnavailable("down"))
    queue = make_queue(work, broken, reader)
    for _ in range(5):
        assert one_batch(queue) == 3
        assert one_batch(queue) == 0, "not tried again at once"
        with work.catalogue.write() as session:
            session.execute(update(KVObject).values(lease_expires=time.time() - 1))
    assert broken.puts == 5, "after the first refusal the others are not tried"
    broken.error = None
    assert one_batch(queue) == 3
    assert work.view(job)["status"] == "completed"


def test_an_object_that_the_store_refuses_fails_after_three_attempts(
    work: Work, store: KVStore, reader: TinyReader
) -> None:
    work.ingest(work.corpus(), {"a.txt": "one"})
    broken = Broken(store, ValueError("no"))
    assert make_queue(work, broken, reader).drain() == 3
    assert statuses(work) == ["failed"]


def test_a_dead_workers_rows_are_reaped_and_the_fourth_time_fails(
    work: Work, store: KVStore, reader: TinyReader
) -> None:
    job = work.ingest(work.corpus(), {"a.txt": paragraphs(2)})
    for attempt in (1, 2):
        with work.catalogue.write() as session:
            assert rows.claim(session, "dead", 0.01, 10**6, None) is not None
        time.sleep(0.03)
        with work.catalogue.write() as session:
            assert rows.reap(session) == 2
            assert rows.reap(session) == 0, "what waits is not touched"
        assert work.count(KVObject, KVObject.attempt == attempt, KVObject.status == "pending") == 2
    with work.catalogue.write() as session:
        rows.claim(session, "dead", 0.01, 10**6, None)
    time.sleep(0.03)
    with work.catalogue.write() as session:
        rows.reap(session)
        settle(session, job)
    assert statuses(work) == ["failed", "failed"]
    assert work.view(job)["status"] == "completed_with_errors"


def test_a_long_batch_keeps_its_lease(work: Work, store: KVStore, reader: TinyReader) -> None:
    work.ingest(work.corpus(), {"a.txt": paragraphs(2)})
    broken = Broken(store)

    def slow() -> None:
        time.sleep(0.5)
        with work.catalogue.write() as session:
            assert rows.reap(session) == 0

    broken.before_put = slow
    make_queue(work, broken, reader, lease_seconds=0.3).drain()
    assert reader.compiled == 2


def test_who_lost_the_lease_ends_nothing(work: Work, store: KVStore, reader: TinyReader) -> None:
    job = work.ingest(work.corpus(), {"a.txt": "one"})
    with work.catalogue.write() as session:
        stale = rows.claim(session, "slow", 60, 10**6, None)
        assert stale is not None
        session.execute(update(KVObject).values(lease_expires=time.time() - 1))
        rows.reap(session)
    make_queue(work, store, reader).drain()
    before = work.view(job)
    with work.catalogue.write() as session:
        rows.mark_done(session, stale, {stale.rows[0].key: 7}, 1.0)
        rows.give_back(session, stale, [stale.rows[0].key], blame=True, max_attempts=1)
    assert statuses(work) == ["done"]
    assert work.view(job) == before
    with work.catalogue.write() as session:
        assert rows.request_repair(session, stale.rows[0].key)
        assert rows.claim(session, "other", 60, 10**6, None) is not None
        rows.mark_done(session, stale, {stale.rows[0].key: 7}, 1.0)
    assert statuses(work) == ["leased"], "another worker holds it"


def test_two_workers_compute_each_chunk_once(work: Work, store: KVStore, reader: TinyReader) -> None:
    job = work.ingest(work.corpus(), {"a.txt": paragraphs(20)})
    queues = [make_queue(work, store, reader, f"kv{i}", batch_tokens=30) for i in range(2)]
    threads = [threading.Thread(target=queue.drain) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reader.compiled == 20
    assert work.view(job)["progress"]["chunks_computed"] == 20
    assert work.view(job)["status"] == "completed"


def test_writing_one_batch_overlaps_computing_the_next(
    work: Work, store: KVStore, reader: TinyReader
) -> None:
    work.ingest(work.corpus(), {"a.txt": paragraphs(3)})
    broken = Broken(store)
    second_computed = threading.Event()
    compile_ = reader.compile_readings

    def watched(batch: Sequence[Reading]) -> list[torch.Tensor]:
        if reader.batches:
            second_computed.set()
        return compile_(batch)

    reader.compile_readings = watched  # type: ignore[method-assign]
    broken.before_put = lambda: second_computed.wait(5) or pytest.fail("the next batch waited for the store")
    make_queue(work, broken, reader, batch_tokens=1).drain()
    assert statuses(work) == ["done"] * 3


def test_a_shared_chunk_is_computed_once_for_both_jobs(
    work: Work, store: KVStore, reader: TinyReader
) -> None:
    corpus = work.corpus()
    first = work.ingest(corpus, {"a.txt": paragraphs(3)})
    second = work.ingest(corpus, {"b.txt": paragraphs(3)})
    make_queue(work, store, reader).drain()
    assert reader.compiled == 3
    assert {work.view(first)["status"], work.view(second)["status"]} == {"completed"}
    assert work.view(second)["progress"]["chunks_reused"] == 3
    third = work.ingest(corpus, {"c.txt": paragraphs(3)})
    assert work.view(third)["status"] == "completed"
    assert work.view(third)["progress"]["kv_bytes_reused"] == work.view(first)["progress"]["kv_bytes_written"]


def test_a_damaged_object_is_computed_again(work: Work, store: KVStore, reader: TinyReader) -> None:
    job = work.ingest(work.corpus(), {"a.txt": "one"})
    queue = make_queue(work, store, reader)
    queue.drain()
    before = work.view(job)
    with work.catalogue.read() as session:
        [key] = session.scalars(select(KVObject.key))
    store.delete([key])
    assert store.get(key, PROFILE) is Miss.ABSENT
    assert repair(work, key)
    assert not repair(work, key), "it is owed already"
    assert not repair(work, "0" * 64)
    queue.drain()
    assert isinstance(store.get(key, PROFILE), KVRecord)
    assert work.view(job) == before


def test_a_repair_during_a_job_counts_its_chunk_once(work: Work, store: KVStore, reader: TinyReader) -> None:
    job = work.ingest(work.corpus(), {"a.txt": paragraphs(2)})
    queue = make_queue(work, store, reader, batch_tokens=15)
    one_batch(queue)
    with work.catalogue.read() as session:
        [key] = session.scalars(select(KVObject.key).where(KVObject.status == "done"))
    assert repair(work, key)
    queue.drain()
    assert reader.compiled == 3
    assert work.view(job)["progress"]["chunks_computed"] == 2


def test_rows_of_another_model_are_never_stored(work: Work, store: KVStore, reader: TinyReader) -> None:
    work.ingest(work.corpus(), {"a.txt": paragraphs(2)})
    queue = make_queue(work, store, reader, kv_keys=lambda batch, group, codec: ["0" * 64 for _ in batch])
    queue.drain()
    assert statuses(work) == ["failed", "failed"]
    assert reader.compiled == 0


def test_a_document_deleted_while_its_kv_is_computed_leaves_no_object(
    work: Work, store: KVStore, reader: TinyReader
) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "one"})
    document = work.document(corpus, "a.txt")
    assert document is not None
    broken = Broken(store)
    broken.before_put = lambda: work.deleter.document("t1", document.id)
    make_queue(work, broken, reader).drain()
    assert statuses(work) == ["purge"]
    sweep(work.catalogue, store.delete)
    assert list(work.objects.list("")) == []
    assert statuses(work) == []


def test_cancel_stops_the_kv_of_its_job(work: Work, store: KVStore, reader: TinyReader) -> None:
    job = work.ingest(work.corpus(), {"a.txt": paragraphs(4)})
    queue = make_queue(work, store, reader, batch_tokens=15)
    one_batch(queue)
    with work.catalogue.write() as session:
        cancel(session, job)
    assert work.view(job)["status"] == "cancelled"
    assert queue.drain() == 0
    assert reader.compiled == 1


def test_tenants_take_turns_in_kv(work: Work, store: KVStore, reader: TinyReader) -> None:
    work.ingest(work.corpus("big", "t1"), {"a.txt": paragraphs(6)})
    work.ingest(work.corpus("small", "t2"), {"b.txt": "small one"})
    queue = make_queue(work, store, reader, batch_tokens=15)
    one_batch(queue)
    one_batch(queue)
    assert {len(batch[0]) for batch in reader.batches} == {2, 12}


# --- conditioning -------------------------------------------------------------------------------------------------------


def condition(work: Work, corpus: Corpus, conditioning: str) -> Corpus:
    with work.catalogue.write() as session:
        session.get_one(Corpus, corpus.id).settings = {"conditioning": conditioning}
    return corpus


def conditioned(work: Work, conditioning: str) -> Corpus:
    return condition(work, work.corpus(), conditioning)


def ids_of(work: Work, corpus: Corpus, path: str) -> list[tuple[int, ...]]:
    query = select(ChunkRow.token_ids).join(Document, Document.id == ChunkRow.document_id)
    query = query.where(Document.corpus_id == corpus.id, Document.path == path).order_by(ChunkRow.ordinal)
    with work.catalogue.read() as session:
        return [struct.unpack(f"<{len(ids) // 4}I", ids) for ids in session.scalars(query)]




def test_a_window_is_read_in_one_batch_and_a_batch_within_its_budget(
    work: Work, store: KVStore, reader: TinyReader
) -> None:
    """A document of many windows: whatever its keys are, its chunks are worked on in its order."""
    corpus = conditioned(work, "document")
    work.ingest(corpus, {"long.txt": paragraphs(600)})
    make_queue(work, store, reader, batch_tokens=4000).drain()
    read = readings(ids_of(work, corpus, "long.txt"), "document")
    assert sum(len(r) == 1 for r in read) > 3, "several windows"
    assert reader.readings == read, "in the document's order"
    for batch in reader.batched:
        union = {r[: n + 1] for r in batch for n in range(len(r))}
        assert sum(len(r[-1]) for r in union) <= 4000
    computed = sum(len({r[: n + 1] for r in batch for n in range(len(r))}) for batch in reader.batched)
    assert computed < 1.5 * len(read), "nearly nothing is read twice"


@pytest.mark.parametrize("batch_tokens", [1, 30, 4096])
def test_chunks_are_read_behind_those_before_them(
    batch_tokens: int, work: Work, store: KVStore, reader: TinyReader
) -> None:
    corpus = conditioned(work, "document")
    work.ingest(corpus, {"a.txt": paragraphs(4), "b.txt": paragraphs(2)})
    make_queue(work, store, reader, batch_tokens=batch_tokens).drain()
    assert set(statuses(work)) == {"done"}
    a = ids_of(work, corpus, "a.txt")
    b = ids_of(work, corpus, "b.txt")
    assert a[:2] == b  # the same text in another document is read alike, and once
    assert sorted(reader.readings) == sorted(tuple(a[: n + 1]) for n in range(4))


def test_an_edit_computes_what_was_read_behind_it_again(work: Work, store: KVStore, reader: TinyReader) -> None:
    corpus = conditioned(work, "document")
    work.ingest(corpus, {"a.txt": paragraphs(5)})
    make_queue(work, store, reader).drain()
    reader.readings.clear()
    lines = paragraphs(9).split("\n\n")
    work.ingest(corpus, {"a.txt": "\n\n".join([*lines[:3], lines[8], lines[4]])})
    make_queue(work, store, reader).drain()
    chunks = ids_of(work, corpus, "a.txt")
    assert sorted(reader.readings) == sorted(tuple(chunks[: n + 1]) for n in (3, 4))


def test_rows_of_an_earlier_setting_are_still_computed(work: Work, store: KVStore, reader: TinyReader) -> None:
    corpus = conditioned(work, "document")
    work.ingest(corpus, {"a.txt": paragraphs(3)})
    condition(work, corpus, "none")
    make_queue(work, store, reader).drain()
    assert sorted(map(len, reader.readings)) == [1, 2, 3]
    assert set(statuses(work)) == {"done"}


def test_another_setting_makes_a_document_work_again(work: Work, store: KVStore, reader: TinyReader) -> None:
    corpus = conditioned(work, "none")
    work.ingest(corpus, {"a.txt": paragraphs(3)})
    make_queue(work, store, reader).drain()
    condition(work, corpus, "document")
    job = work.ingest(corpus, {"a.txt": paragraphs(3)})
    make_queue(work, store, reader).drain()
    assert sorted(map(len, reader.readings)) == [1, 1, 1, 2, 3]
    assert work.view(job)["progress"]["chunks_computed"] == 2  # the first chunk is read alike under both


def test_windows_are_bounded_and_cover_every_chunk_once() -> None:
    chunks = [(n,) * 500 for n in range(7)] + [(9,) * 3000, (8,)]
    read = readings(chunks, "document")
    assert [r[-1] for r in read] == chunks
    assert [len(r) for r in read] == [1, 2, 3, 1, 2, 3, 1, 1, 1]
    assert readings(chunks, "none") == [(c,) for c in chunks]
    assert readings([], "document") == []


# --- another site ---


def test_what_another_site_stores_is_not_computed_here(work: Work, store: KVStore, reader: TinyReader) -> None:
    job = work.ingest(work.corpus(), {"a.txt": paragraphs(4)})
    with work.catalogue.read() as session:
        keys = list(session.scalars(select(KVObject.key).order_by(KVObject.created_at)))
    asked: list[str] = []

    def elsewhere(keys: Sequence[str]) -> Elsewhere:
        asked.extend(keys)
        return Elsewhere(dict.fromkeys(asked[:3], 77))

    make_queue(work, store, reader, elsewhere=elsewhere).drain()
    assert sorted(asked) == sorted(keys)
    assert reader.compiled == 1
    assert statuses(work) == ["done"] * 4
    view = work.view(job)
    assert view["status"] == "completed"
    assert view["progress"]["chunks_computed"] == 1
    with work.catalogue.read() as session:
        assert sorted(session.scalars(select(KVObject.bytes)))[:3] == [77] * 3
    assert len(list(work.objects.list("kv/"))) == 1, "it is read from there when it is needed"


def test_what_another_site_is_computing_is_waited_for(
    work: Work, store: KVStore, reader: TinyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.ingest(work.corpus(), {"a.txt": paragraphs(2)})
    ready: list[str] = []

    def elsewhere(keys: Sequence[str]) -> Elsewhere:
        stored = {key: 5 for key in keys if key in ready}
        return Elsewhere(stored, frozenset(set(keys) - stored.keys()))

    queue = make_queue(work, store, reader, elsewhere=elsewhere)
    queue.drain()
    assert statuses(work) == ["pending", "pending"]
    with work.catalogue.read() as session:
        assert set(session.scalars(select(KVObject.attempt))) == {0}, "waiting is nobody's fault"
        ready.extend(session.scalars(select(KVObject.key)))
    assert one_batch(queue) == 0, "not asked again at once"
    later = time.time() + RETRY_DELAY + 1
    monkeypatch.setattr(time, "time", lambda: later)
    queue.drain()
    assert statuses(work) == ["done", "done"]
    assert reader.compiled == 0


def test_poison_beside_what_is_stored_elsewhere_fails_alone(work: Work, store: KVStore, reader: TinyReader) -> None:
    work.ingest(work.corpus(), {"a.txt": paragraphs(4)})
    with work.catalogue.read() as session:
        rows_by_key = {row.kv_key: row for row in session.scalars(select(ChunkRow).order_by(ChunkRow.ordinal))}
    keys = list(rows_by_key)
    reader.poison = struct.unpack("<I", rows_by_key[keys[1]].token_ids[:4])[0]
    make_queue(work, store, reader, elsewhere=lambda _: Elsewhere({keys[0]: 1}), max_attempts=1).drain()
    with work.catalogue.read() as session:
        found = {row.key: row.status for row in session.scalars(select(KVObject))}
    assert [found[key] for key in keys] == ["done", "failed", "done", "done"]


def test_a_worker_that_is_told_to_end_gives_its_rows_back_unharmed(work: Work, store: KVStore, reader: TinyReader) -> None:
    work.ingest(work.corpus(), {"a.txt": paragraphs(5)})
    stop = threading.Event()

    def compile_readings(batch: Sequence[Reading]) -> list[torch.Tensor]:
        stop.set()
        raise Stopping  # as a pass does at its next layer

    first = make_queue(work, store, reader)
    reader.compile_readings = compile_readings  # type: ignore[method-assign]
    assert first.drain(stop.is_set) == 5, "so that the bell is rung for them"
    assert work.count(KVObject, KVObject.status == "pending", KVObject.attempt == 0, KVObject.lease_expires.is_(None)) == 5
    assert make_queue(work, store, TinyReader(), "kv2").drain() == 5
    assert work.count(KVObject, KVObject.status == "done", KVObject.attempt == 0) == 5


def test_broken_kv_is_computed_again_by_a_job_that_tells_the_truth(work: Work, store: KVStore, reader: TinyReader) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(4), "b.txt": paragraphs(1), "c.txt": "another text"})
    queue = make_queue(work, store, reader)
    queue.drain()
    with work.catalogue.read() as session:
        of_a = select(ChunkRow.kv_key).join(Document).where(Document.path == "a.txt")
        broken = session.scalars(of_a.order_by(ChunkRow.ordinal).limit(2)).all()
    store.delete(broken)
    with work.catalogue.write() as session:
        [job] = [each.id for each in queue_recompute(session, broken)]
    assert work.view(job)["type"] == "precompute"
    before = reader.compiled
    work.worker().drain()
    assert work.view(job)["status"] == "in_progress", "its KV is still owed"
    queue.drain()
    shown = work.view(job)
    assert shown["status"] == "completed"
    assert reader.compiled - before == 2
    progress = shown["progress"]
    assert (progress["chunks_computed"], progress["chunks_reused"], progress["files_total"]) == (2, 3, 2)
    assert work.count(KVObject, KVObject.status != "done") == 0
    assert work.parser.parsed.count("a.txt") == 1, "no document was read again"


def test_kv_that_cannot_be_computed_again_is_an_error_of_its_job(work: Work, store: KVStore, reader: TinyReader) -> None:
    work.ingest(work.corpus(), {"a.txt": paragraphs(2)})
    make_queue(work, store, reader).drain()
    with work.catalogue.write() as session:
        keys = session.scalars(select(KVObject.key)).all()
        [job] = [each.id for each in queue_recompute(session, keys)]
    work.worker().drain()
    make_queue(work, Broken(store, ValueError("never")), reader).drain()
    assert [error["code"] for error in work.view(job)["errors"]] == ["kv_failed"]
    assert work.view(job)["status"] == "completed_with_errors"
