"""A job is cancelled within a second, whatever its work is at: a parser that loops, a batch of texts, an archive, a batch of KV.

Measured from the cancelling to the time that the job's end is written down with. A machine that is busy gets as much longer
as it takes longer for what a heartbeat does, measured beside.
"""

from __future__ import annotations

import io
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fixtures_models import Models
from fixtures_work import WordEmbedder, Work, paragraphs
from test_isolate import LOOPS

from ingest import expand, pipes
from ingest.files import SOURCE_PURPOSE, store_file
from ingest.isolate import ParserPool
from ingest.jobs import cancel, settle
from ingest.worker import IngestWorker
from precompute.compiling import OwnCompiler
from precompute.queue import KVQueue
from storage.catalogue.schema import ChunkRow, File, Job, KVObject
from storage.conditioning import Reading
from storage.kvstore import KVStore
from storage.types import KVProfile

PATIENCE = 60.0  # seconds until something is given up that a test waits for


class Pace:
    """How much longer than asked for a wait and a write take now, at most."""

    def __init__(self, work: Work) -> None:
        self.late, self._work, self._end = 0.0, work, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.is_set():
            begun = time.monotonic()
            time.sleep(0.05)
            with self._work.catalogue.write():
                self.late = max(self.late, time.monotonic() - begun - 0.05)

    def __enter__(self) -> Pace:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def eventually(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


@contextmanager
def draining(worker: Any) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=worker.drain, daemon=True)
    thread.start()
    yield thread
    thread.join(PATIENCE)
    assert not thread.is_alive()


def cancelled_within_a_second(work: Work, job_id: str) -> None:
    with Pace(work) as pace:
        begun = time.time()
        with work.catalogue.write() as session:
            cancel(session, job_id)
        eventually(lambda: work.view(job_id)["finished_at"] is not None, "the end of the job")
    shown = work.view(job_id)
    assert shown["status"] == "cancelled"
    assert shown["finished_at"] - begun < 1.0 + 4 * pace.late, pace.late


@pytest.mark.parametrize("name", LOOPS)
def test_while_a_parser_loops_and_its_child_is_killed(work: Work, name: str) -> None:
    job = work.upload(work.corpus(), {name: LOOPS[name]})
    with ParserPool(wall_s=600) as pool:
        pool.parse(b"warm", "a.txt")
        child = pool._all[0]._process
        assert child is not None
        files = pool._all[0].files
        worker = IngestWorker(work.catalogue, replace(work.pipeline, parser=pool), None, "w1", work.rung.append, 60.0)
        with draining(worker):
            eventually(lambda: pool._all[0].files > files, "the parse")
            time.sleep(0.5)  # in the midst of it
            assert child.poll() is None
            cancelled_within_a_second(work, job)
        assert child.poll() is not None
        assert pool.parse(b"next", "a.txt").text == "next"


def test_while_a_batch_of_texts_is_embedded(work: Work) -> None:
    batch, over = threading.Event(), threading.Event()

    class Embedder(WordEmbedder):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            batch.set()
            assert over.wait(PATIENCE)
            return super().embed(texts)

    job = work.upload(work.corpus(), {"a.txt": paragraphs(100)})
    mine = replace(work.pipeline, embedder=Embedder())
    with draining(IngestWorker(work.catalogue, mine, None, "w1", work.rung.append, 60.0)):
        assert batch.wait(PATIENCE)
        cancelled_within_a_second(work, job)
        assert not over.is_set(), "the encoder is at it still"
        over.set()
    assert work.count(ChunkRow) == 0


def test_while_a_text_is_cut(work: Work) -> None:
    """Nothing looks whether it is wanted there: the heartbeat ends the file."""
    cutting, over = threading.Event(), threading.Event()

    def cut(parsed: Any) -> Any:
        cutting.set()
        assert over.wait(PATIENCE)
        return work.cut(parsed)

    job = work.upload(work.corpus(), {"a.txt": paragraphs(2)})
    with draining(IngestWorker(work.catalogue, replace(work.pipeline, cut=cut), None, "w1", work.rung.append, 60.0)):
        assert cutting.wait(PATIENCE)
        cancelled_within_a_second(work, job)
        over.set()
    assert work.count(ChunkRow) == 0
    assert work.view(job)["status"] == "cancelled"


def test_while_an_archive_is_unpacked_and_nothing_of_it_is_left(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(5000):
            archive.writestr(f"{number}.txt", f"text {number} " * 50)
    children: list[Any] = []
    start = pipes.start
    monkeypatch.setattr(pipes, "start", lambda *given: children.append(start(*given)) or children[-1])
    stored: list[str] = []

    def store(*given: Any) -> File:
        stored.append(given[3])
        return store_file(*given)

    monkeypatch.setattr(expand, "store_file", store)
    job = work.upload(work.corpus(), {"a.zip": data.getvalue()})
    with draining(work.worker()):
        eventually(lambda: len(stored) > 10, "some members")
        assert children[0].poll() is None
        cancelled_within_a_second(work, job)
    assert children[0].poll() is not None
    assert len(stored) < 5000
    eventually(lambda: work.count(File, File.purpose == SOURCE_PURPOSE) == 0, "the members' end")


class TinyReader:
    """A real reader of a tiny model, whose tokens are fewer than the tests' own. `layers` counts its layers' calls."""

    def __init__(self, models: Models) -> None:
        self.real = models.reader("llama")
        self.profile = self.real.profile
        self.layers = 0

    def stored_as(self, codec: str | None) -> KVProfile:
        return self.profile if codec is None else replace(self.profile, codec=codec)

    def compile_readings(self, readings: Sequence[Reading]) -> list[torch.Tensor]:
        return self.real.compile_readings([tuple(tuple(i % 100 for i in ids) for ids in each) for each in readings])


def test_while_a_batch_of_kv_is_computed_which_stops_at_its_next_layer(work: Work, tiny_models: Models) -> None:
    reader, at_it, over = TinyReader(tiny_models), threading.Event(), threading.Event()
    first = work.ingest(work.corpus(), {"a.txt": paragraphs(3)})
    store = KVStore(work.objects)

    def settled(jobs: set[str]) -> None:
        for each in jobs:
            with work.catalogue.write() as session:
                settle(session, each)

    queue = KVQueue(work.catalogue, OwnCompiler(reader, store), "kv", kv_keys=work.pipeline.kv_keys, settled=settled)

    def check() -> None:
        reader.layers += 1
        at_it.set()
        end = time.monotonic() + PATIENCE
        while not over.is_set() and time.monotonic() < end:  # a layer that takes long
            queue.check()
            time.sleep(0.01)
        queue.check()

    reader.real.check = check
    with draining(queue):
        assert at_it.wait(PATIENCE)
        second = work.ingest(work.corpus("other"), {"b.txt": "another text of another job"})
        cancelled_within_a_second(work, first)
        eventually(lambda: reader.layers > 1, "the next batch, in place of the rest of this one")
        over.set()
    with work.catalogue.read() as session:
        assert session.get_one(Job, second).status == "completed"
    assert work.count(KVObject, KVObject.status == "done") == 1
    assert len(list(work.objects.list("kv/"))) == 1
