"""The tick finds what was forgotten, and Celery is only the doorbell."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from celery import Celery
from fixtures_work import Work, paragraphs
from sqlalchemy import update

import ingest.tasks
import precompute.tasks
from ingest.leases import claim_file
from ingest.ticker import Ticker
from precompute import rows
from storage.catalogue.schema import JobFile, KVObject


@pytest.fixture
def ticker(work: Work) -> Ticker:
    return Ticker(work.catalogue, work.rung.append, work.delete_kv, rows.reap, rows.has_work, lambda: None)


def test_it_rings_for_what_waits_and_is_silent_otherwise(work: Work, ticker: Ticker) -> None:
    ticker.tick()
    assert work.rung == []
    job = work.upload(work.corpus(), {"a.txt": "text"})
    ticker.tick()
    assert work.rung == ["ingest"]
    work.rung.clear()
    work.worker().drain()
    work.rung.clear()
    ticker.tick()
    assert work.rung == ["precompute"]
    with work.catalogue.write() as session:
        session.execute(update(KVObject).values(status="done", bytes=1))
    ticker.tick()
    assert work.view(job)["status"] == "completed", "whoever forgot to settle it"


def test_it_returns_what_dead_workers_held_and_rings(work: Work, ticker: Ticker) -> None:
    job = work.upload(work.corpus(), {"a.txt": "text"})
    work.lease_seconds = 5
    assert claim_file(work.catalogue, "dead", 5) is not None
    ticker.tick()
    assert work.count(JobFile, JobFile.status == "leased") == 1, "its lease has not run out"
    with work.catalogue.write() as session:
        session.execute(update(JobFile).values(lease_expires=time.time() - 1))
    ticker.tick()
    assert work.rung == ["ingest"]
    work.worker().drain()
    with work.catalogue.write() as session:
        assert rows.claim(session, "dead", -1, 100, None) is not None
    ticker.tick()
    assert work.count(KVObject, KVObject.status == "pending", KVObject.attempt == 1) == 1
    assert work.view(job)["status"] == "in_progress"


def test_it_deletes_what_is_marked(work: Work, ticker: Ticker) -> None:
    work.ingest(work.corpus(), {"a.txt": paragraphs(2)})
    with work.catalogue.write() as session:
        session.execute(update(KVObject).values(status="purge"))
    ticker.tick()
    assert work.count(KVObject) == 0
    assert len(work.deleted) == 2


def test_the_tasks_are_on_their_own_app_only_and_answer_a_bell(work: Work, ticker: Ticker) -> None:
    app, other = Celery("one", set_as_current=False), Celery("two", set_as_current=False)
    drained: list[float] = []
    queue = SimpleNamespace(drain=lambda seconds: drained.append(seconds) or len(drained) < 2)
    parts = SimpleNamespace(ingest_worker=work.worker(), ticker=ticker, kv_queue=queue, ring=work.rung.append)
    ingest.tasks.register(app, lambda: parts)
    precompute.tasks.register(app, lambda: parts)
    names = {"preread.ingest", "preread.precompute", "preread.tick"}
    assert names <= set(app.tasks)
    assert not names & set(other.tasks)
    corpus = work.corpus()
    work.upload(corpus, {"a.txt": "text"})
    app.tasks["preread.ingest"]()
    assert work.chunks(corpus) == ["text"]
    assert work.rung == ["precompute", "ingest"]
    app.tasks["preread.ingest"]()
    assert work.rung == ["precompute", "ingest"], "a bell that rang in vain is not rung again"
    app.tasks["preread.precompute"]()
    app.tasks["preread.precompute"]()
    assert work.rung == ["precompute", "ingest", "precompute"]
    app.tasks["preread.tick"]()
