"""Processes killed with SIGKILL at random points of fifty jobs: every job ends, and what it says is so."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fixtures_models import Models
from live_site import Backends, Site, until
from sqlalchemy import func, select, text
from wire import Wire

from serving.local_broker import LocalBroker
from storage.catalogue.schema import ChunkRow, Document, IndexGeneration, Job, JobFile, KVObject
from storage.errors import FILE_ERROR_CODES

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(3600)]

JOBS, KILLS, SEED = 50, 14, int(os.environ.get("CHAOS_SEED", "20261130"))
PATIENCE = 900.0  # seconds: a process that starts on a busy machine may take minutes
MOST_LOST = 0.05  # share of the sound files that may fail because their workers were killed three times
VICTIMS = ("worker-1", "worker-2", "serve", "beat", "broker")
ACTIVE = ("queued", "in_progress", "cancelling")


@pytest.fixture
def small_site(tmp_path: Path, broker: LocalBroker, tiny_models: Models) -> Iterator[Site]:
    """A site whose reader is tiny; nothing of it is started."""
    model = tiny_models.folder("chaos", "llama", max_position_embeddings=8192)
    site = Site(tmp_path, Backends({}, shared_folder=True), broker, model)
    try:
        yield site
    finally:
        site.stop()


def words(number: int, file: int) -> str:
    """A document with a word of its own, and a paragraph that it shares with others."""
    own = " ".join(f"unique{number}x{file} fact {n}." for n in range(25 + 10 * (number % 4)))
    return f"# Note {number}\n\n{own}\n\nAll of them are inspected in March, shed {number % 5}.\n"


def files_of(number: int) -> list[tuple[str, bytes]]:
    found = [(f"n{number}/{file}.md", words(number, file).encode()) for file in range(1 + number % 3)]
    if number % 7 == 0:
        found.append((f"n{number}/broken.pdf", b"%PDF-1.4 nothing"))
    if number % 9 == 0:
        found.append((f"n{number}/0.md.copy.md", words(number, 0).encode()))
    return found


def insist(site: Site, method: str, path: str, **arguments: Any) -> Any:
    """Ask until the API, which may have been killed, has answered."""
    headers = {"authorization": f"Bearer {site.key}"}
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            answer = httpx.request(method, f"{site.url}/v1{path}", headers=headers, timeout=30, **arguments)
            if answer.status_code < 500:
                assert answer.status_code < 400, answer.text
                return answer.json()
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"no answer to {method} {path}: {site.log('serve')}")


class Killer(threading.Thread):
    """Kills one process after the other, and starts it again."""

    def __init__(self, site: Site, broker: LocalBroker) -> None:
        super().__init__(daemon=True)
        self.site, self.broker, self.dice = site, broker, random.Random(SEED)
        self.killed: Counter[str] = Counter()
        self.calm = threading.Event()

    def run(self) -> None:
        order = [VICTIMS[n % len(VICTIMS)] for n in range(KILLS)]
        self.dice.shuffle(order)
        for victim in order:
            if self.calm.wait(self.dice.uniform(1.0, 8.0)):
                return
            self.kill(victim)
            self.killed[victim] += 1

    def kill(self, victim: str) -> None:
        if victim == "broker":
            assert self.broker.process is not None
            where = urlsplit(self.broker.url)
            self.broker.process.kill()
            self.broker.process.wait()
            time.sleep(self.dice.uniform(0, 2))
            self.broker.process = self.broker._launch(where.port or 0, where.password or "")
            return
        process = self.site.processes[victim]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.site.start(victim.partition("-")[0], victim)


def active_jobs(site: Site) -> int:
    catalogue = site.catalogue()
    with catalogue.read() as session:
        count = session.scalar(select(func.count()).where(Job.status.in_(ACTIVE))) or 0
    catalogue.close()
    return count


def test_fifty_jobs_end_truthfully_whoever_is_killed(small_site: Site, broker: LocalBroker) -> None:
    site = small_site
    site.start("serve")
    site.wait_ready(600)
    for command, name in (("worker", "worker-1"), ("worker", "worker-2"), ("beat", None)):
        site.start(command, name)
    corpus = insist(site, "POST", "/vector_stores", json={"name": "chaos"})["id"]
    killer = Killer(site, broker)
    killer.start()
    for number in range(JOBS):
        sent = [("files", (path, data)) for path, data in files_of(number)]
        insist(site, "POST", f"/corpora/{corpus}/documents", files=sent)
    killer.join(PATIENCE)
    assert sum(killer.killed.values()) == KILLS, killer.killed
    assert set(killer.killed) == set(VICTIMS)
    until(lambda: active_jobs(site) == 0, PATIENCE, "the end of all jobs")
    check_rows(site)
    check_searches(site, corpus)


def check_rows(site: Site) -> None:
    """Each chunk once, in all tables and indexes; each file done with its KV stored, or failed with a code."""
    catalogue = site.catalogue()
    with catalogue.read() as session:
        jobs = session.scalars(select(Job)).all()
        files = session.scalars(select(JobFile)).all()
        documents = {row.id: row for row in session.scalars(select(Document))}
        chunks = session.execute(select(ChunkRow.document_id, ChunkRow.ordinal, ChunkRow.kv_key)).all()
        kv = {row.key: row.status for row in session.scalars(select(KVObject))}
        [generation] = session.scalars(select(IndexGeneration.name))
        tables = [f"index_{kind}_{generation}" for kind in ("vector", "words")]
        vectors, lexical = (session.scalar(text(f"SELECT count(*) FROM {table}")) for table in tables)
    catalogue.close()
    wanted = {path for number in range(JOBS) for path, _ in files_of(number)}
    assert len(jobs) >= JOBS
    assert {document.path for document in documents.values()} == wanted
    assert Counter(job.status for job in jobs).keys() <= {"completed", "completed_with_errors", "failed"}
    assert max(Counter((c.document_id, c.ordinal) for c in chunks).values()) == 1
    assert vectors == lexical == len(chunks)
    by_document: dict[str, set[str | None]] = {}
    for chunk in chunks:
        by_document.setdefault(chunk.document_id, set()).add(chunk.kv_key)
    stored = Counter(name.rsplit("/", 1)[1] for name in site.objects().list("kv/"))
    assert stored == Counter(key for key, status in kv.items() if status == "done"), "what is marked is stored, once"
    errors = {(job.id, e["filename"]): e["code"] for job in jobs for e in job.result["final"]["errors"]}
    for file in files:
        if file.status in ("done", "unchanged"):
            assert documents[file.document_id or ""].status == "completed"
            keys = by_document[file.document_id or ""]
            lost = {key for key in keys if key not in stored}
            assert not lost or (file.job_id, file.path) in errors, "a file that lacks its KV says so"
        else:
            assert file.status == "failed"
            assert errors[file.job_id, file.path] in FILE_ERROR_CODES
    broken = [file for file in files if file.path.endswith("broken.pdf")]
    assert {file.status for file in broken} == {"failed"}
    sound = [file for file in files if file not in broken]
    lost = Counter(errors[key] for file in sound if (key := (file.job_id, file.path)) in errors)
    assert set(lost) <= {"worker_lost", "storage_error", "kv_failed"}, lost
    assert lost.total() <= len(sound) * MOST_LOST, lost


def check_searches(site: Site, corpus: str) -> None:
    listed = insist(site, "GET", f"/vector_stores/{corpus}/files?filter=failed&limit=100")
    assert not listed["has_more"]
    failed = {file["path"] for file in listed["data"]}
    for number in range(JOBS):
        for file in range(1 + number % 3):
            paths = [f"n{number}/{file}.md"]
            if number % 9 == 0 and file == 0:  # of two documents with one text a search may show either
                paths.append(f"n{number}/0.md.copy.md")
            if failed.issuperset(paths):
                continue
            hits = insist(site, "POST", f"/vector_stores/{corpus}/search", json={"query": f"unique{number}x{file}"})["data"]
            [best, *_] = [hit for hit in hits if f"unique{number}x{file} " in hit["content"][0]["text"]]
            assert best["filename"] in paths


# A worker that asks the broker for its messages again long before its batches are done, and writes down what it is given.
VISIBILITY_S = 2
IMPATIENT = f"""
import os, time
from celery.signals import task_prerun
import serving.celery_app
from precompute.queue import KVQueue
serving.celery_app.REDIS_OPTIONS["visibility_timeout"] = {VISIBILITY_S}
computed = KVQueue._computed

def slowly(queue, batch):
    time.sleep({1.5 * VISIBILITY_S})
    return computed(queue, batch)

def delivered(task_id, task, **_):
    with open(os.environ["DELIVERIES"], "a") as file:
        file.write(f"{{task_id}} {{task.name}}\\n")

KVQueue._computed = slowly
task_prerun.connect(delivered)
from serving.cli import main
main()
"""


def test_connections_reset_and_messages_delivered_again_do_each_file_once(small_site: Site, broker: LocalBroker) -> None:
    site, wire = small_site, Wire(broker.url.replace("redis://", "http://"))
    try:
        where = urlsplit(broker.url)
        site.backends.environ["PREREAD_BROKER_URL"] = f"redis://:{where.password}@127.0.0.1:{wire.url.rsplit(':', 1)[1]}/0"
        site.backends.environ["PREREAD_LEASE_SECONDS"] = "600"  # nobody dies here: a lease runs out on a starved machine only
        site.start("serve")
        site.start("beat")
        site.backends.environ["DELIVERIES"] = str(site.folder / "deliveries")
        for number in (1, 2):
            site.start("worker", f"worker-{number}", [sys.executable, "-c", IMPATIENT, "worker"])
        site.wait_ready(600)
        corpus = insist(site, "POST", "/vector_stores", json={"name": "resets"})["id"]
        long = "\n\n".join(words(number, 0) for number in range(20)).encode()
        for number in range(6):
            sent = [("files", (f"{number}.md", b"# %d\n\n" % number + long))]
            insist(site, "POST", f"/corpora/{corpus}/documents", files=sent)
            wire.cut(reset=number % 2 == 0)
            time.sleep(1)
            wire.heal()
        until(lambda: active_jobs(site) == 0, PATIENCE, "the end of all jobs")
    finally:
        wire.close()
    catalogue = site.catalogue()
    with catalogue.read() as session:
        generations = session.scalars(select(Document.generation)).all()
        attempts = session.scalars(select(JobFile.attempt)).all()
        statuses = session.scalars(select(Job.status)).all()
        chunks = session.execute(select(ChunkRow.document_id, ChunkRow.ordinal)).all()
        computed = sum(job.result["kv"]["chunks"] for job in session.scalars(select(Job)))
        kv = session.scalars(select(KVObject.status)).all()
    catalogue.close()
    deliveries = Counter((site.folder / "deliveries").read_text().split("\n"))
    again = {task: count for task, count in deliveries.items() if count > 1}
    assert again, f"no message was delivered twice: this proves nothing ({deliveries.total()} deliveries)"
    assert set(statuses) == {"completed"}
    assert (set(generations), set(attempts)) == ({1}, {0}), "one commit of each file"
    assert max(Counter(map(tuple, chunks)).values()) == 1
    assert set(kv) == {"done"}
    assert computed == len(kv), "each chunk's KV once"
