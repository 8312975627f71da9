"""Worker, API and beat killed with SIGKILL at random points of fifty jobs. (With the broker and the real models:
tests/distributed/test_chaos.py.)"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fixtures_work import Work
from kill_kit import JOBS, LOOPS, files_of
from sqlalchemy import func, select, text

from storage.catalogue.schema import ChunkRow, Document, IndexGeneration, Job, JobFile, KVObject

KILLS = 25
SEEDS = [20261130] if "KILL_SEEDS" not in os.environ else [int(seed) for seed in os.environ["KILL_SEEDS"].split(",")]


class Service:
    """The processes, forked from one that has imported all they need."""

    def __init__(self, folder: Path) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["kill_kit"])
        self.folder = folder
        self.processes: dict[str, Any] = {}
        for name in LOOPS:
            self.start(name)

    def start(self, name: str) -> None:
        process = self.context.Process(target=LOOPS[name], args=(str(self.folder), name), daemon=True)
        process.start()
        self.processes[name] = process

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()

    def stop(self) -> None:
        for name in LOOPS:
            self.kill(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_fifty_jobs_end_truthfully_whoever_is_killed(work: Work, tmp_path: Path, seed: int) -> None:
    corpus = work.corpus()
    dice, killed = random.Random(seed), Counter[str]()
    service = Service(tmp_path)
    try:
        while sum(killed.values()) < KILLS or set(killed) != set(LOOPS):
            time.sleep(dice.uniform(0.05, 0.6))
            victim = dice.choice(sorted(LOOPS))
            assert service.processes[victim].is_alive(), f"{victim} has ended by itself"
            service.kill(victim)
            killed[victim] += 1
            service.start(victim)
        until = time.monotonic() + 300
        while not _all_ended(work):
            assert time.monotonic() < until, work.count(JobFile, JobFile.status.in_(("pending", "leased")))
            time.sleep(0.2)
    finally:
        service.stop()
    _check(work, corpus.id)


def _all_ended(work: Work) -> bool:
    made = select(func.count(func.distinct(Job.id)))
    with work.catalogue.read() as session:
        ended = session.scalar(made.where(Job.finished_at.is_not(None))) or 0
        return ended == session.scalar(made) and ended >= JOBS


def _check(work: Work, corpus_id: str) -> None:
    """Every file is searchable with its KV or failed with its code; every chunk is there once."""
    with work.catalogue.read() as session:
        files = session.scalars(select(JobFile)).all()
        jobs = {job.id: job for job in session.scalars(select(Job))}
        documents = {row.path: row for row in session.scalars(select(Document))}
        chunks = session.execute(select(Document.path, ChunkRow.ordinal, ChunkRow.text).join(Document)).all()
        kv = Counter(session.scalars(select(KVObject.status)))
        keys = set(session.scalars(select(ChunkRow.kv_key)))
        [generation] = session.scalars(select(IndexGeneration.name))
        tables = [f"index_{kind}_{generation}" for kind in ("vector", "words")]
        indexes = [session.scalar(text(f"SELECT count(*) FROM {table}")) for table in tables]
    assert {job.status for job in jobs.values()} <= {"completed", "completed_with_errors", "failed"}
    assert set(kv) == {"done"}
    assert {name.rsplit("/", 1)[1] for name in work.objects.list("kv/")} == keys
    assert indexes == [len(chunks)] * 2
    wanted = {path: data for number in range(JOBS) for path, data in files_of(number).items()}
    assert documents.keys() == wanted.keys()
    texts: dict[str, list[str]] = {}
    for path, _, chunk in sorted(chunks):
        texts.setdefault(path, []).append(chunk)
    for file in files:
        shown = {error["filename"]: error["code"] for error in jobs[file.job_id].result["final"]["errors"]}
        if file.path.endswith("broken.txt"):
            assert shown[file.path] in ("invalid_file", "worker_lost")
        elif file.status in ("done", "unchanged"):
            assert texts[file.path] == str(wanted[file.path]).split("\n\n")
        else:
            assert (file.status, shown[file.path]) == ("failed", "worker_lost")
    assert len([f for f in files if f.error_code == "worker_lost"]) < len(files) // 4, "most survive the killing"
