"""Chunks that vLLM compiles: what it is asked, what is believed of it, and what becomes of a batch when it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling_kit import SECRET, Compiling, compiling, of_tokens
from fixtures_models import Models
from fixtures_work import Work, key_of, paragraphs
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from vllm_server_kit import spec_of

from ingest.deletes import Deleter
from ingest.jobs import settle
from ingest.purge import sweep
from precompute import reader as reader_module
from precompute.queue import RETRY_DELAY, KVQueue
from precompute.spec import ReaderSpec
from precompute.types import Wanted
from serving.engine import vllm_compiler
from serving.engine.vllm_compiler import AT_ONCE, VLLMCompiler, prompts
from serving.engine.vllm_saved import Shelf
from serving.parts import Wiring
from serving.settings import Settings
from storage.catalogue.schema import KVObject
from storage.errors import EngineUnavailable, Stopping
from storage.kvstore import KVStore
from storage.tiers.store import object_name
from storage.types import KVProfile, KVRecord, Miss

PATIENCE = 60.0
CLOSE = 1e-4  # of K and V in fp32, as between our reader's passes of other shapes


@pytest.fixture
def spec(tiny_models: Models) -> ReaderSpec:
    return spec_of(tiny_models.folder("llama"))


@pytest.fixture
def store(work: Work) -> KVStore:
    return KVStore(work.objects)


@pytest.fixture
def vllm(store: KVStore, spec: ReaderSpec) -> Iterator[Compiling]:
    with compiling(store, of_tokens(spec.layers, spec.kv_heads, spec.head_dim)) as made:
        yield made


def shelf_of(work: Work, records: Any = None) -> Shelf:
    return Shelf(records or KVStore(work.objects), lambda key: work.objects.size(object_name(key)))


class Queue:
    """The queue's worker before a vLLM. `records`: by default the store itself."""

    def __init__(self, work: Work, url: str, spec: ReaderSpec, records: Any = None, stored_s: float = 5.0) -> None:
        self.work, self.stopping = work, threading.Event()
        compiler = VLLMCompiler(
            spec, url, shelf_of(work, records), secret=SECRET, check=self.check, token="key-of-vllm", stored_s=stored_s
        )
        self.queue = KVQueue(work.catalogue, compiler, "kv", kv_keys=work.pipeline.kv_keys, settled=self.settle)

    def check(self) -> None:
        if self.stopping.is_set():
            raise Stopping
        self.queue.check()

    def settle(self, jobs: set[str]) -> None:
        with self.work.catalogue.write() as session:
            for job in jobs:
                settle(session, job)

    def drain(self) -> int:
        return self.queue.drain(self.stopping.is_set)


def ingested(work: Work, chunks: int, tenant: str = "t1") -> str:
    return work.ingest(work.corpus(tenant=tenant), {"a.txt": paragraphs(chunks, tag=tenant)})


def owed(work: Work) -> list[tuple[str, int]]:
    """Each row's status and attempts."""
    with work.catalogue.read() as session:
        return sorted((row.status, row.attempt) for row in session.scalars(select(KVObject)))


def due(work: Work) -> None:
    """Let the pause until the next try be over."""
    with work.catalogue.write() as session:
        for row in session.scalars(select(KVObject)):
            row.lease_expires = None


# --- what vLLM is asked, and stores ---


def test_what_is_owed_is_read_by_vllm_and_the_job_ends(work: Work, vllm: Compiling, spec: ReaderSpec, store: KVStore) -> None:
    job, queue = ingested(work, 5), Queue(work, vllm.url, spec)
    assert queue.drain() == 5
    shown = work.view(job)
    assert (shown["status"], shown["progress"]["chunks_computed"]) == ("completed", 5)
    with work.catalogue.read() as session:
        rows = session.scalars(select(KVObject)).all()
    assert shown["progress"]["kv_bytes_written"] == sum(row.bytes for row in rows) > 0
    for row in rows:
        record = store.get(row.key, spec.profile)
        assert isinstance(record, KVRecord)
        assert key_of(record.token_ids, "t1") == row.key
        assert row.bytes == work.objects.size(object_name(row.key))
    assert queue.queue.throughput.tokens == sum(row.tokens for row in rows)
    for body, plan in zip(vllm.bodies, vllm.plans, strict=True):
        [span] = plan.saves
        assert body["prompt"][: span.start] == spec.prefix_ids
        assert span.end == len(body["prompt"])
        assert (body["model"], body["max_tokens"]) == ("served-under-this-name", 1)
        assert (plan.spans, plan.group) == ((), "t1")


def test_chunks_and_windows_are_read_as_our_own_reader_reads_them(
    tiny_models: Models, spec: ReaderSpec, store: KVStore, work: Work
) -> None:
    reader = tiny_models.reader("llama")

    def compute(prompt: list[int], span: Any) -> torch.Tensor:
        kv = reader.buffer(len(prompt))
        reader.prefill(kv, prompt)
        kv[:, 0] = reader.rope.unplace(kv[:, 0], torch.arange(len(prompt)))
        return kv[:, :, :, span.start : span.end].contiguous()

    a, b, c = (tuple(range(20 + 40 * n, 20 + 40 * n + 30 + n)) for n in range(3))
    wanted = [Wanted(f"{n:064x}", "g", read) for n, read in enumerate([(a,), (a, b), (a, b, c), (b,), (c, a)])]
    with compiling(store, compute) as vllm:
        compiler = VLLMCompiler(spec, vllm.url, shelf_of(work), secret=SECRET, check=lambda: None)
        made = compiler.compile(wanted)()
        assert len(vllm.bodies) == 3, "a window is one prompt"
    assert made.written.keys() == {each.key for each in wanted}
    assert not made.failed
    assert not made.unstored
    for each, expected in zip(wanted, reader.compile_readings([each.reading for each in wanted]), strict=True):
        record = store.get(each.key, spec.profile)
        assert isinstance(record, KVRecord)
        assert float((record.kv - expected).abs().max()) < CLOSE
        assert float(expected.abs().max()) > 1


readings = st.lists(st.lists(st.sampled_from([(1,), (2, 3), (4,)]), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12)


@given(readings, st.lists(st.sampled_from(["g", "h"]), min_size=12, max_size=12))
def test_every_chunk_of_a_batch_is_in_one_prompt_whose_reading_begins_as_its_own(found: list[Any], groups: list[str]) -> None:
    batch = [Wanted(str(number), group, read) for number, (read, group) in enumerate(zip(found, groups, strict=False))]
    split = list(prompts(batch))
    assert sorted(each.key for together in split for each in together) == sorted(each.key for each in batch)
    for together in split:
        lengths = [len(each.reading) for each in together]
        assert lengths == sorted(set(lengths))
        assert len({each.sharing_group for each in together}) == 1
        assert all(together[-1].reading[: len(each.reading)] == each.reading for each in together)


def test_vllms_prefix_cache_is_shared_within_a_sharing_group_alone(work: Work, vllm: Compiling, spec: ReaderSpec) -> None:
    for tenant in ("t1", "t2"):
        ingested(work, 3, tenant)
    Queue(work, vllm.url, spec).drain()
    salts = {plan.group: set[str]() for plan in vllm.plans}
    for body, plan in zip(vllm.bodies, vllm.plans, strict=True):
        salts[plan.group].add(body["cache_salt"])
    assert [len(each) for each in salts.values()] == [1, 1]
    assert salts["t1"] != salts["t2"]


def test_a_rules_codec_is_the_stored_objects(vllm: Compiling, spec: ReaderSpec, store: KVStore, work: Work) -> None:
    ids, keys = tuple(range(30, 50)), ["a" * 64, "b" * 64]
    wanted = [Wanted(key, "g", (ids,), codec) for key, codec in zip(keys, (None, "int8"), strict=True)]
    compiler = VLLMCompiler(spec, vllm.url, shelf_of(work), secret=SECRET, check=lambda: None)
    made = compiler.compile(wanted)()
    assert made.written == {key: work.objects.size(object_name(key)) for key in keys}
    assert len(vllm.bodies) == 2, "the stretches of a plan do not overlap"
    assert isinstance(store.get(keys[0], spec.profile), KVRecord)
    assert isinstance(store.get(keys[1], spec.stored_as("int8")), KVRecord)


def test_no_more_prompts_are_with_vllm_than_a_question_may_wait_for(work: Work, vllm: Compiling, spec: ReaderSpec) -> None:
    ingested(work, 3 * AT_ONCE)
    vllm.gate.clear()
    with running(Queue(work, vllm.url, spec)):
        eventually(lambda: vllm.at_once == AT_ONCE)
        time.sleep(3 * vllm_compiler.CHECK_S)
        assert vllm.most == AT_ONCE
        vllm.gate.set()
    assert vllm.most == AT_ONCE
    assert owed(work) == [("done", 0)] * 3 * AT_ONCE


# --- what is not believed ---


@pytest.mark.parametrize("how", ["refuse", "400", "lose", "other"])
def test_what_vllm_does_not_store_fails_alone_and_is_tried_as_often_as_any_chunk(
    work: Work, vllm: Compiling, spec: ReaderSpec, how: str
) -> None:
    job = ingested(work, 4)
    poison: list[list[int]] = []

    def trouble(number: int) -> str:
        if number == 0:
            poison.append(vllm.bodies[0]["prompt"])
        return how if vllm.bodies[number]["prompt"] in poison else ""

    vllm.how = trouble
    # Only what vLLM says nothing against is waited for.
    Queue(work, vllm.url, spec, stored_s=0.2 if how == "lose" else float("inf")).drain()
    assert owed(work) == [("done", 0)] * 3 + [("failed", 3)]
    assert work.view(job)["status"] == "completed_with_errors"
    assert sum(body["prompt"] in poison for body in vllm.bodies) == 3


def test_a_vllm_without_our_connector_is_no_fault_of_the_chunks(work: Work, vllm: Compiling, spec: ReaderSpec) -> None:
    ingested(work, 2)
    vllm.how = lambda number: "plain"
    Queue(work, vllm.url, spec, stored_s=float("inf")).drain()
    assert owed(work) == [("pending", 0)] * 2


@pytest.mark.parametrize("before", [Miss.ABSENT, Miss.DAMAGED])
def test_an_object_is_waited_for_until_it_is_there_whole(work: Work, vllm: Compiling, spec: ReaderSpec, before: Miss) -> None:
    ingested(work, 1)
    with work.catalogue.read() as session:
        [key] = session.scalars(select(KVObject.key))
    if before is Miss.DAMAGED:
        work.objects.put(object_name(key), [b"what is left of an object"])
    vllm.how = lambda number: "late"
    Queue(work, vllm.url, spec).drain()
    assert owed(work) == [("done", 0)]
    assert len(vllm.bodies) == 1
    assert isinstance(KVStore(work.objects).get(key, spec.profile), KVRecord)


@pytest.mark.parametrize("miss", [Miss.TIMEOUT, Miss.UNAVAILABLE])
def test_a_store_that_does_not_answer_is_nobodys_fault(work: Work, vllm: Compiling, spec: ReaderSpec, miss: Miss) -> None:
    class Away:
        def get(self, key: str, profile: KVProfile) -> Miss:
            return miss

    job = ingested(work, 2)
    Queue(work, vllm.url, spec, Away(), stored_s=0.1).drain()
    assert owed(work) == [("pending", 0)] * 2
    assert work.count(KVObject, KVObject.lease_expires > time.time()) == 2
    due(work)
    Queue(work, vllm.url, spec).drain()
    assert work.view(job)["status"] == "completed"


# --- when vLLM is away, and when the work is to end ---


def test_while_vllm_is_away_rows_wait_unblamed_and_no_bell_is_rung(work: Work, vllm: Compiling, spec: ReaderSpec) -> None:
    job = ingested(work, 3)
    assert Queue(work, "http://127.0.0.1:9", spec).drain() == 0
    assert owed(work) == [("pending", 0)] * 3
    assert work.count(KVObject, KVObject.lease_expires < time.time() + RETRY_DELAY + 1) == 3
    assert Queue(work, vllm.url, spec).drain() == 0, "not before the pause is over"
    due(work)
    assert Queue(work, vllm.url, spec).drain() == 3
    assert work.view(job)["status"] == "completed"


@pytest.mark.parametrize("status", ["500", "429", "503"])
def test_what_vllm_could_not_read_just_now_is_owed_unblamed_and_the_rest_is_stored(
    work: Work, vllm: Compiling, spec: ReaderSpec, status: str
) -> None:
    ingested(work, 6)
    vllm.how = lambda number: status if number in (1, 4) else ""
    Queue(work, vllm.url, spec).drain()
    assert owed(work) == [("done", 0)] * 4 + [("pending", 0)] * 2
    due(work)
    Queue(work, vllm.url, spec).drain()
    assert owed(work) == [("done", 0)] * 6


def test_a_worker_that_is_told_to_end_leaves_vllm_at_once_and_gives_its_rows_back(
    work: Work, vllm: Compiling, spec: ReaderSpec
) -> None:
    ingested(work, 6)
    vllm.gate.clear()
    queue = Queue(work, vllm.url, spec)
    with running(queue):
        eventually(lambda: vllm.at_once == AT_ONCE)
        queue.stopping.set()
    assert vllm.left.wait(PATIENCE), "vLLM goes on with prompts that nobody waits for"
    assert owed(work) == [("pending", 0)] * 6
    assert work.count(KVObject, KVObject.lease_expires.is_(None)) == 6
    assert len(vllm.bodies) == AT_ONCE


def test_of_documents_deleted_meanwhile_nothing_stays_in_the_store(work: Work, vllm: Compiling, spec: ReaderSpec) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(8)})
    vllm.gate.clear()
    with running(Queue(work, vllm.url, spec)):
        eventually(lambda: vllm.at_once == AT_ONCE)
        deleter = Deleter(work.catalogue, work.objects, work.index, KVStore(work.objects).delete)
        deleter.corpus(corpus.tenant_id, corpus.id)
        assert work.count(KVObject) == 0
        time.sleep(1)  # so that it has been seen that nobody waits for the batch
        vllm.gate.set()
    assert len(vllm.bodies) == AT_ONCE, "what was not sent yet is not sent"
    assert len(list(work.objects.list("kv/"))) == AT_ONCE, "else nothing is tested"
    sweep(work.catalogue, KVStore(work.objects).delete)
    assert list(work.objects.list("kv/")) == []


def test_a_worker_before_vllm_loads_no_weights(
    tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(reader_module.Reader, "__init__", refuse)
    folder = tiny_models.folder("llama")
    wiring = Wiring(Settings(data_dir=tmp_path, model=str(folder), engine="vllm", vllm_url="http://127.0.0.1:9"))
    try:
        [key] = wiring.kv_keys([((1, 2, 3),)], "g", None)
        assert key is not None
        assert wiring.kv_queue.drain() == 0
        with pytest.raises(EngineUnavailable):
            wiring.kv_queue._compiler.compile([Wanted(key, "g", ((1, 2, 3),))])
    finally:
        wiring.close()


class running:
    """A queue's drain in a thread, ended before the block is left."""

    def __init__(self, queue: Queue) -> None:
        self._thread = threading.Thread(target=queue.drain)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
