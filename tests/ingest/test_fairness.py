"""One tenant's many files, or a source that takes long to list, do not hold up another tenant's single file."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from big_jobs import big_job
from fixtures_work import Work

from ingest.jobs import create_job
from storage.catalogue.schema import Job, JobFile


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
