"""The processes of a small service, each an endless loop over one catalogue and one folder of objects: to be killed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from fixtures_work import open_work, paragraphs
from sqlalchemy import select

from ingest.jobs import settle
from ingest.ticker import Ticker
from precompute import rows
from storage.catalogue.schema import Corpus, JobFile
from storage.errors import Overloaded, StorageUnavailable

JOBS = 50
LEASE_SECONDS = 1.0


def files_of(number: int) -> dict[str, str | bytes]:
    """A job's files: paragraphs of its own and some that others have too, every seventh job a broken one besides."""
    found: dict[str, str | bytes] = {
        f"n{number}/{file}.txt": paragraphs(4, tag=f"n{number}f{file}x") + "\n\n" + paragraphs(1, tag=f"shared{number % 5}x")
        for file in range(1 + number % 3)
    }
    if number % 7 == 0:
        found[f"n{number}/broken.txt"] = "ERROR invalid_file"
    return found


def api(folder: str, name: str) -> None:
    """Upload what has no job yet, one after the other."""
    work = open_work(Path(folder))
    with work.catalogue.read() as session:
        corpus = session.scalars(select(Corpus)).one()
    for number in range(JOBS):
        path = f"n{number}/0.txt"
        if not work.count(JobFile, JobFile.path == path):
            with contextlib.suppress(Overloaded):
                work.upload(corpus, files_of(number))
        time.sleep(0.02)
    time.sleep(3600)


def worker(folder: str, name: str) -> None:
    """Ingest what waits, and store the KV that is owed: ten bytes for each key."""
    work = open_work(Path(folder))
    work.lease_seconds = LEASE_SECONDS
    work.parser.accident = lambda path: time.sleep(0.03)
    ingest = work.worker(name)
    while True:
        with contextlib.suppress(Overloaded, StorageUnavailable):
            ingest.drain(seconds=0.5)
            with work.catalogue.write() as session:
                batch = rows.claim(session, name, LEASE_SECONDS, 100, None)
            if batch is not None:
                time.sleep(0.03)
                for row in batch.rows:
                    work.objects.put(f"kv/{row.key[:2]}/{row.key}", [b"ten bytes."])
                with work.catalogue.write() as session:
                    rows.mark_done(session, batch, {row.key: 10 for row in batch.rows}, 0.1)
                    jobs = rows.waiting_jobs(session, [row.key for row in batch.rows])
                for job_id in sorted(jobs):
                    with work.catalogue.write() as session:
                        settle(session, job_id)
        time.sleep(0.02)


def beat(folder: str, name: str) -> None:
    """Tick."""
    work = open_work(Path(folder))
    ticker = Ticker(work.catalogue, work.rung.append, work.delete_kv, rows.reap, rows.has_work, lambda: None)
    while True:
        with contextlib.suppress(Overloaded, StorageUnavailable):
            ticker.tick()
        time.sleep(0.2)


LOOPS = {"api": api, "worker-1": worker, "worker-2": worker, "beat": beat}
