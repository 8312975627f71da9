"""Jobs tell the truth: what they count, how they end, and that an end is an end."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

import pytest
from fixtures_work import Work, paragraphs, settle_all
from sqlalchemy import select, update

from ingest.isolate import ParserPool
from ingest.job_view import job_events, progress_id
from ingest.jobs import cancel, retry
from ingest.leases import claim_file
from ingest.ticker import reap
from storage.catalogue.schema import Document, Job, JobFile, KVObject
from storage.errors import UserError


def test_a_job_ends_when_its_kv_is_stored_and_not_before(work: Work) -> None:
    corpus = work.corpus()
    job = work.ingest(corpus, {"a.txt": paragraphs(3)})
    assert work.view(job)["status"] == "in_progress"
    assert work.view(job)["stage"] == "kv"
    assert len(work.chunks(corpus)) == 3
    work.compute_kv()
    shown = work.view(job)
    assert shown["status"] == "completed"
    assert shown["finished_at"] >= shown["started_at"] >= shown["created_at"]


def test_the_job_object_has_every_field(work: Work) -> None:
    shown = work.view(work.ingest(work.corpus(), {"a.txt": "one"}))
    assert set(shown) == set(
        "id object type status corpus_id created_at started_at last_heartbeat_at finished_at attempt "
        "max_attempts stage progress errors warnings".split()
    )
    assert set(shown["progress"]) == set(
        "files_total files_done files_failed files_unchanged chunks_total chunks_reused chunks_computed "
        "kv_bytes_written kv_bytes_reused eta_seconds".split()
    )


def test_a_failed_file_is_named_with_its_code_and_the_others_are_done(work: Work) -> None:
    corpus = work.corpus()
    job = work.ingest(corpus, {"good.txt": "fine", "bad.txt": "ERROR ocr_required"})
    work.compute_kv()
    shown = work.view(job)
    assert shown["status"] == "completed_with_errors"
    assert (shown["progress"]["files_done"], shown["progress"]["files_failed"]) == (1, 1)
    [error] = shown["errors"]
    assert (error["filename"], error["code"], error["retryable"]) == ("bad.txt", "ocr_required", False)
    document = work.document(corpus, "bad.txt")
    assert document is not None
    assert (document.status, document.error_code, document.done_hash) == ("failed", "ocr_required", None)


def test_a_job_whose_files_all_failed_has_failed(work: Work) -> None:
    job = work.ingest(work.corpus(), {"bad.txt": "ERROR invalid_file"})
    assert work.view(job)["status"] == "failed"


def test_an_empty_text_is_no_silent_success(work: Work) -> None:
    job = work.ingest(work.corpus(), {"blank.txt": "\n\n \n"})
    assert work.view(job)["errors"][0]["code"] == "no_text_extracted"


def test_a_terminal_job_never_changes(work: Work) -> None:
    corpus = work.corpus()
    job = work.ingest(corpus, {"a.txt": paragraphs(3)})
    work.compute_kv()
    before = work.view(job)
    work.ingest(corpus, {"a.txt": paragraphs(5, tag="other")})
    with work.catalogue.write() as session:
        cancel(session, job)
        session.execute(update(KVObject).values(status="failed"))
        settle_all(session)
        reap(session)
    assert work.view(job) == before


def test_one_poison_chunk_fails_only_itself(work: Work) -> None:
    corpus = work.corpus()
    texts = paragraphs(32).split("\n\n")
    texts[7] += " POISON"
    job = work.ingest(corpus, {"a.txt": "\n\n".join(texts)})
    work.compute_kv()
    assert len(work.chunks(corpus)) == 31
    dense, lexical = work.search(corpus, "p6w1 p7w1 p8w1")
    assert len(dense) == 31
    assert len(lexical) == 2
    shown = work.view(job)
    assert shown["status"] == "completed_with_errors"
    assert shown["errors"][0]["code"] == "embedding_failed"
    document = work.document(corpus, "a.txt")
    assert document is not None
    assert document.done_hash is None, "an incomplete document must be tried again"


def test_a_file_of_which_nothing_can_be_embedded_fails(work: Work) -> None:
    job = work.ingest(work.corpus(), {"a.txt": "POISON"})
    assert work.view(job)["status"] == "failed"
    assert work.view(job)["errors"][0]["code"] == "embedding_failed"


def test_failed_kv_is_an_error_of_the_job_and_retry_computes_it(work: Work) -> None:
    corpus = work.corpus()
    job = work.ingest(corpus, {"a.txt": paragraphs(2), "b.txt": "other"})
    with work.catalogue.write() as session:
        key = session.scalars(select(KVObject.key).where(KVObject.tokens > 5)).first()
        session.execute(update(KVObject).where(KVObject.key == key).values(status="failed"))
    work.compute_kv()
    shown = work.view(job)
    assert shown["status"] == "completed_with_errors"
    [error] = shown["errors"]
    assert (error["filename"], error["code"], error["retryable"]) == ("a.txt", "kv_failed", True)
    with work.catalogue.write() as session:
        again = retry(session, job).id
    work.worker().drain()
    assert work.compute_kv() == 1
    assert work.view(again)["status"] == "completed"
    assert work.view(again)["progress"]["files_total"] == 1
    assert work.parser.parsed == ["a.txt", "b.txt"], "the text was not read again"


def test_retry_takes_the_failed_files_only(work: Work) -> None:
    job = work.ingest(work.corpus(), {"good.txt": "fine", "bad.txt": "ERROR parser_timeout"})
    with work.catalogue.write() as session, pytest.raises(UserError):
        retry(session, job)  # it still runs
    work.compute_kv()
    with work.catalogue.write() as session:
        again = retry(session, job).id
    assert work.view(again)["progress"]["files_total"] == 1


def test_cancel_drops_what_waits_and_the_kv_nobody_else_wants(work: Work) -> None:
    corpus = work.corpus()
    first = work.upload(corpus, {"a.txt": paragraphs(2), "b.txt": "later"})
    lease = claim_file(work.catalogue, "w", 5)
    assert lease is not None
    work.pipeline.process(lease)
    second = work.upload(corpus, {"c.txt": paragraphs(2).split("\n\n")[0]})
    with work.catalogue.write() as session:
        session.query(JobFile).filter(JobFile.path == "b.txt").update({"lease_expires": time.time() + 600})
    work.worker().drain()
    with work.catalogue.write() as session:
        cancel(session, first)
    shown = work.view(first)
    assert shown["status"] == "cancelled"
    assert work.worker().drain() == 0
    assert work.count(KVObject, KVObject.status == "purge") == 1, "the shared chunk is still owed"
    assert work.compute_kv() == 1
    assert work.view(second)["status"] == "completed"
    assert len(work.chunks(corpus, "a.txt")) == 2


def test_cancel_reaches_a_running_file_within_a_second(work: Work) -> None:
    corpus = work.corpus()
    job = work.upload(corpus, {"a.txt": paragraphs(2)})

    def cancel_and_wait(name: str) -> None:
        with work.catalogue.write() as session:
            cancel(session, job)
        assert work.view(job)["status"] == "cancelling"
        time.sleep(0.9)

    work.parser.accident = cancel_and_wait
    work.worker().drain()
    assert work.view(job)["status"] == "cancelled"
    assert work.chunks(corpus) == []
    document = work.document(corpus, "a.txt")
    assert document is not None
    assert document.status == "cancelled"


def test_cancel_ends_a_parse_that_would_go_on_for_long(work: Work) -> None:
    corpus = work.corpus()
    job = work.upload(corpus, {"a.html": b"<div>" * 480_000})
    with ParserPool(wall_s=600) as pool:
        pool.parse(b"warm", "a.txt")
        child = pool._all[0]._process
        assert child is not None
        lease = claim_file(work.catalogue, "w", 60)
        assert lease is not None
        running = threading.Thread(target=replace(work.pipeline, parser=pool).process, args=(lease,))
        running.start()
        time.sleep(0.3)
        with work.catalogue.write() as session:
            cancel(session, job)
        running.join(30)
        assert work.view(job)["status"] == "cancelled"
        assert work.view(job)["errors"][0]["code"] == "cancelled"
        assert child.poll() == -signal.SIGKILL


def test_cancel_just_before_the_commit_stores_nothing(work: Work) -> None:
    corpus = work.corpus()
    job = work.upload(corpus, {"a.txt": paragraphs(2)})
    pipeline = work.pipeline

    def cancelled(*args: object) -> list[str | None]:
        with work.catalogue.write() as session:
            cancel(session, job)
        return [None, None]

    lease = claim_file(work.catalogue, "w", 60)
    assert lease is not None
    replace(pipeline, kv_keys=cancelled).process(lease)
    assert work.view(job)["status"] == "cancelled"
    assert work.chunks(corpus) == []


def test_twenty_jobs_on_one_worker_none_reaped_while_waiting(work: Work) -> None:
    corpus = work.corpus()
    work.lease_seconds = 0.05
    jobs = [work.upload(corpus, {f"{i}.txt": f"text {i}"}) for i in range(20)]
    time.sleep(0.1)  # longer than a lease
    with work.catalogue.write() as session:
        assert reap(session) == set()
    work.lease_seconds = 5.0
    assert work.worker().drain() == 20
    work.compute_kv()
    assert {work.view(job)["status"] for job in jobs} == {"completed"}
    assert work.count(JobFile, JobFile.attempt > 0) == 0


def test_tenants_take_turns(work: Work) -> None:
    big, small = work.corpus("big", "t1"), work.corpus("small", "t2")
    work.upload(big, {f"big{i}.txt": f"big {i}" for i in range(10)})
    work.upload(small, {f"small{i}.txt": f"small {i}" for i in range(2)})
    work.worker().drain()
    early = {name for name in work.parser.parsed[:4] if name.startswith("small")}
    assert early == {"small0.txt", "small1.txt"}


def test_files_of_one_document_are_worked_on_in_order(work: Work) -> None:
    corpus = work.corpus()
    work.upload(corpus, {"a.txt": "old text"})
    first = claim_file(work.catalogue, "w1", 5)
    work.upload(corpus, {"a.txt": "new text"})
    assert first is not None
    assert claim_file(work.catalogue, "w2", 5) is None, "the older upload is still being worked on"
    work.pipeline.process(first)
    work.worker().drain()
    assert work.chunks(corpus) == ["new text"]


def test_progress_never_goes_back_and_events_resume(work: Work) -> None:
    corpus = work.corpus()
    files = {f"{i}.txt": paragraphs(3, tag=f"t{i}x") for i in range(4)}
    job = work.upload(corpus, files | {"bad.txt": "ERROR invalid_file"})
    seen = [progress_id(work.view(job))]
    while (lease := claim_file(work.catalogue, "w", 5)) is not None:
        work.pipeline.process(lease)
        seen.append(progress_id(work.view(job)))
    work.compute_kv()
    seen.append(progress_id(work.view(job)))
    assert seen == sorted(set(seen)), "each step has a later id than the one before"
    asked = [(each, frozenset[str]()) for each in (job, "job-unknown")]
    [((job_id, _), (number, shown))] = job_events(work.catalogue, asked).items()
    assert (job_id, number, shown["status"]) == (job, seen[-1], "completed_with_errors")


def test_two_files_with_one_path_in_a_job_are_refused(work: Work) -> None:
    from ingest.jobs import JobItem, create_job

    corpus = work.corpus()
    items = [JobItem("a", "doc-1", "file-1"), JobItem("a", "doc-1", "file-2")]
    with work.catalogue.write() as session, pytest.raises(UserError, match="twice"):
        create_job(session, tenant_id="t1", corpus_id=corpus.id, type="ingest", items=items)
    assert work.count(Job) == 0
    assert work.count(Document) == 0
