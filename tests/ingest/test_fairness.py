"""One tenant's many files, large syncs, archives and long texts do not hold up another tenant's single file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from big_jobs import big_job
from fixtures_work import HeldEmbedder, WordEmbedder, Work, paragraphs, zipped_texts

from ingest import expand, hand, pipeline
from ingest.embedding import BATCH, GROUP, EmbedQueue
from ingest.files import store_file
from ingest.jobs import create_job
from ingest.plans import claim_plan
from ingest.worker import IngestWorker
from storage.catalogue.schema import Corpus, File, Job, JobFile
from storage.types import Chunk, ParsedDocument

PATIENCE = 60.0  # seconds that a busy machine may take for what takes none


def test_a_single_file_waits_for_one_file_of_the_tenant_with_twenty_thousand(work: Work) -> None:
    big_job(work, work.corpus("big", "t1"), 20_000)
    small = work.corpus("small", "t2")
    seen: list[str] = []

    def arrive_late(name: str) -> None:
        seen.append(name)
        if len(seen) == 10:
            work.upload(small, {"single.txt": "the other tenant's"})

    work.parser.accident = arrive_late
    worker = work.worker()
    worker.drain(stop=lambda: len(seen) >= 20)
    assert "single.txt" in seen[10:12], seen
    assert work.chunks(small) == ["the other tenant's"]


def test_files_of_several_tenants_are_done_in_turn_whoever_came_first(work: Work) -> None:
    for tenant in ("a", "b", "c"):
        corpus = work.corpus(tenant, tenant)
        work.upload(corpus, {f"{tenant}{i}.txt": f"{tenant} {i}" for i in range(20 if tenant == "a" else 3)})
    work.worker().drain()
    assert sorted(name[0] for name in work.parser.parsed[:9]) == list("aaabbbccc")


def test_a_file_is_done_while_another_tenants_source_is_being_listed(work: Work) -> None:
    slow, quick = work.corpus("slow", "t1"), work.corpus("quick", "t2")
    done = threading.Event()

    def plan(job: Job) -> None:
        work.upload(quick, {"quick.txt": "in time"})
        listed_in_time.append(done.wait(20))

    listed_in_time: list[bool] = []
    work.parser.accident = lambda name: done.set()
    with work.catalogue.write() as session:
        create_job(session, tenant_id="t1", corpus_id=slow.id, type="sync", planned=False)
    worker = work.worker(planner=SimpleNamespace(plan=plan))
    worker.drain(stop=lambda: bool(listed_in_time))
    assert listed_in_time == [True]
    assert work.count(JobFile, JobFile.status == "done") == 1


def syncs(work: Work, corpus: Corpus, count: int) -> None:
    with work.catalogue.write() as session:
        for _ in range(count):
            create_job(session, tenant_id=corpus.tenant_id, corpus_id=corpus.id, type="sync", planned=False)


def test_tenants_take_turns_of_plans_whoever_has_a_queue_of_them(work: Work) -> None:
    syncs(work, work.corpus("a", "t1"), 3)
    syncs(work, work.corpus("b", "t2"), 1)
    planned: list[str] = []
    while (job := claim_plan(work.catalogue, "w1", 60.0, last_tenant=planned[-1] if planned else None)) is not None:
        planned.append(job.tenant_id)
    assert planned == ["t1", "t2", "t1", "t1"]


def test_a_small_sync_is_planned_while_another_tenants_large_one_is_read(work: Work) -> None:
    syncs(work, work.corpus("a", "t1"), 3)
    syncs(work, work.corpus("b", "t2"), 1)
    small, at_once, most = threading.Event(), [0], [0]
    in_time: list[bool] = []

    def plan(job: Job) -> None:
        if job.tenant_id == "t2":
            small.set()
            return
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        in_time.append(small.wait(PATIENCE))
        at_once[0] -= 1

    work.worker(planner=SimpleNamespace(plan=plan)).drain(stop=lambda: len(in_time) == 3)
    assert in_time == [True] * 3
    assert most == [1], "a tenant's plans one after the other"


def test_a_file_is_done_while_another_tenants_archive_is_unpacked(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    in_time: list[bool] = []

    def store(*given: Any) -> File:
        in_time.append(done.wait(PATIENCE))
        return store_file(*given)

    monkeypatch.setattr(expand, "store_file", store)
    big, quick = work.corpus("big", "t1"), work.corpus("quick", "t2")
    work.upload(big, {"a.zip": zipped_texts(m="one", n="two"), "b.zip": zipped_texts(o="three"), "c.zip": zipped_texts(p="four")})
    work.upload(quick, {"quick.txt": "in time"})
    worker = work.worker()

    def ring(queue: str) -> None:
        if work.chunks(quick):
            done.set()

    worker.ring = ring
    worker.drain()
    assert in_time == [True] * 4
    assert sorted(work.chunks(big)) == ["four", "one", "three", "two"]


@pytest.fixture
def long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is a long one from three thousand characters on, so that a test need not cut a million."""
    monkeypatch.setattr(hand, "TEXT_IN_HAND", 3000)
    monkeypatch.setattr(pipeline, "LONG_TEXT", 3000)


@pytest.mark.parametrize("tenant", ["t1", "t2"])
@pytest.mark.usefixtures("long_texts")
def test_a_file_is_done_while_a_very_long_text_is_embedded(work: Work, tenant: str) -> None:
    long, quick = work.corpus("long", "t1"), work.corpus("quick", tenant)
    in_time: list[bool] = []
    seen: list[str] = []

    class Embedder(WordEmbedder):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            if not seen:
                work.upload(quick, {"quick.txt": "in time"})
                eventually(lambda: "quick.txt" in work.parser.parsed)
                time.sleep(0.5)  # until it has been cut
            elif "in time" in seen and not in_time:  # the long text goes on, so the other one has its vectors
                in_time.append(eventually(lambda: work.chunks(quick, "quick.txt") == ["in time"]))
            seen.extend("in time" if text.endswith("in time") else "long" for text in texts)
            return super().embed(texts)

    job = work.upload(long, {"long.txt": paragraphs(1200)})
    worker = IngestWorker(work.catalogue, replace(work.pipeline, embedder=Embedder()), None, "w1", work.rung.append, 60.0)
    worker.drain()
    assert in_time == [True]
    assert len(work.chunks(long, "long.txt")) == 1200
    assert work.view(job)["errors"] == []


def test_a_text_of_another_tenant_is_in_the_very_next_batch_and_a_file_of_the_same_one_in_the_next_group() -> None:
    embedder = HeldEmbedder()
    queue, batches = EmbedQueue(embedder), embedder.batches
    long = queue.ask([f"long {i:05}" for i in range(3 * GROUP)], "t1")
    same, other = queue.ask(["same"], "t1"), queue.ask(["other"], "t2")
    embedder.gate.set()
    assert [len(asked.done.result(PATIENCE)) for asked in (long, same, other)] == [3 * GROUP, 1, 1]
    [of_other] = [at for at, batch in enumerate(batches) if "other" in batch]
    [of_same] = [at for at, batch in enumerate(batches) if "same" in batch]
    assert of_other <= 2
    assert of_same <= GROUP // BATCH + 2
    assert {len(batch) for batch in batches[:-1]} == {BATCH}, "full all the same"


@pytest.mark.usefixtures("long_texts")
def test_a_tenant_has_two_long_files_in_hand_and_no_more_and_only_one_of_them_cut(work: Work) -> None:
    cut: list[int] = []
    leased: list[int] = []

    class Embedder(WordEmbedder):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            if not leased:
                eventually(lambda: work.count(JobFile, JobFile.status == "leased") > 1)
                time.sleep(0.5)  # time enough to take more
                leased.extend((work.count(JobFile, JobFile.status == "leased"), len(cut)))
            return super().embed(texts)

    def count(parsed: ParsedDocument) -> Sequence[Chunk]:
        cut.append(len(parsed.text))
        return work.cut(parsed)

    work.upload(work.corpus(), {f"{i}.txt": paragraphs(60, tag=f"t{i}x") for i in range(5)})
    mine = replace(work.pipeline, embedder=Embedder(), cut=count)
    IngestWorker(work.catalogue, mine, None, "w1", work.rung.append, 60.0).drain()
    assert leased == [2, 1]
    assert len(cut) == 5
    assert work.count(JobFile, JobFile.status == "done") == 5


def test_a_second_bell_leaves_the_process_to_others(work: Work) -> None:
    worker = work.worker()
    answered: list[int] = []
    work.parser.accident = lambda name: answered.append(worker.drain())
    work.upload(work.corpus(), {"a.txt": "one", "b.txt": "two"})
    assert worker.drain() == 2
    assert answered == [0, 0]


def eventually(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()
