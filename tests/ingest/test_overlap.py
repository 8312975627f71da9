"""While files are computed the next is read, and a few wait for their vectors together: no file is lost or done twice by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fixtures_work import HeldEmbedder, WordEmbedder, Work
from sqlalchemy import select
from sqlalchemy.event import listen

from ingest import hand
from ingest.embedding import BATCH, GROUP, EmbedQueue
from ingest.hand import IN_HAND
from ingest.jobs import cancel
from ingest.leases import CANCEL_SECONDS, JobStatus
from ingest.ticker import reap
from ingest.worker import IngestWorker
from storage.catalogue.schema import ChunkRow, Job, JobFile

PATIENCE = 30.0  # seconds that a busy machine may take for what takes none


@dataclass
class Watched:
    """Says when a file is parsed and when its text is embedded, and does what a test asks meanwhile."""

    work: Work
    events: list[str] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)  # the last words of the texts that were embedded together
    embedding: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.work.parser.accident = lambda name: self.events.append(f"parse {name}")
        watched = self

        class Embedder(WordEmbedder):
            def embed(self, texts: Sequence[str]) -> list[list[float]]:
                watched.batches.append([text.split()[-1] for text in texts])
                watched.embedding(texts[0])
                return super().embed(texts)

        pipeline = replace(self.work.pipeline, embedder=Embedder())
        self.worker = IngestWorker(
            self.work.catalogue, pipeline, None, "w1", self.work.rung.append, self.work.lease_seconds
        )

    def until(self, event: str) -> None:
        wait_for(lambda: event in self.events, event)

    @property
    def leased(self) -> int:
        return self.work.count(JobFile, JobFile.status == "leased")


def wait_for(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


@pytest.fixture
def watched(work: Work) -> Watched:
    return Watched(work)


def three(work: Work) -> dict[str, Any]:
    return work.upload(work.corpus(), {"a.txt": "first", "b.txt": "second", "c.txt": "third"})


def test_the_next_file_is_parsed_while_one_is_embedded(watched: Watched) -> None:
    def embedding(text: str) -> None:
        if text.endswith("first"):
            watched.until("parse b.txt")
        if text.endswith("second"):
            watched.until("parse c.txt")

    watched.embedding = embedding
    three(watched.work)
    assert watched.worker.drain() == 3
    assert watched.work.count(JobFile, JobFile.status == "done") == 3
    assert watched.work.count(ChunkRow) == 3


def many(work: Work, files: int, words: int = 1) -> dict[str, Any]:
    return work.upload(work.corpus(), {f"{n:02}.txt": "long " * words + f"number{n}" for n in range(files)})


def done(work: Work) -> list[str]:
    with work.catalogue.read() as session:
        return [row.path for row in session.query(JobFile).filter(JobFile.status == "done").order_by(JobFile.id)]


def first_is_held(watched: Watched, until: Callable[[], bool]) -> list[int]:
    """Hold the first text at the encoder until that is so, and then for a while; what is leased by then."""
    held: list[int] = []

    def embedding(text: str) -> None:
        if not held:
            wait_for(until, "enough files in hand")
            time.sleep(0.3)  # time enough to take more
            held.append(watched.leased)

    watched.embedding = embedding
    return held


def test_small_files_are_embedded_together(watched: Watched) -> None:
    first_is_held(watched, lambda: watched.leased > IN_HAND)
    files = IN_HAND + 4
    many(watched.work, files)
    assert watched.worker.drain() == files
    assert watched.batches[0] == ["number0"]
    assert len(watched.batches[1]) == IN_HAND - 1
    assert sorted(word for batch in watched.batches for word in batch) == sorted(f"number{n}" for n in range(files))
    assert watched.work.count(ChunkRow) == files


def test_texts_of_like_length_go_to_the_encoder_together_whenever_their_files_come() -> None:
    embedder = HeldEmbedder()
    queue = EmbedQueue(embedder)
    first = queue.ask(["x"], "t1")
    assert embedder.begun.wait(PATIENCE)
    files = [queue.ask(["x" * (10 * n + i) for n in range(1, BATCH + 1)], "t1") for i in range(4)]
    embedder.gate.set()
    assert [len(file.done.result(PATIENCE)) for file in (first, *files)] == [1, *[BATCH] * 4]
    lengths = [[len(text) for text in batch] for batch in embedder.batches]
    assert all(max(some) - min(some) < 10 * BATCH / 3 for some in lengths)
    given = sorted(10 * n + i for n in range(1, BATCH + 1) for i in range(4))
    assert sorted(length for some in lengths[1:] for length in some) == given


def test_a_long_text_is_embedded_though_another_file_brings_shorter_ones_without_end() -> None:
    embedder = HeldEmbedder()
    queue = EmbedQueue(embedder)
    many = queue.ask([f"word {i % 1000:03}" for i in range(8 * GROUP)], "t1")
    long = queue.ask(["long " * 20], "t1")
    embedder.gate.set()
    assert len(long.done.result(PATIENCE)) == 1
    assert len(many.done.result(PATIENCE)) == 8 * GROUP
    [at] = [number for number, some in enumerate(embedder.batches) if any(text.startswith("long") for text in some)]
    assert at <= 2 * GROUP // BATCH + 2


def test_the_files_of_a_job_ask_once_between_them_whether_it_goes_on(work: Work) -> None:
    work.upload(work.corpus(), {"a.txt": "first"})
    with work.catalogue.read() as session:
        job_id = session.scalars(select(Job.id)).one()
    statements: list[str] = []
    listen(work.catalogue.engine, "before_cursor_execute", lambda _, cursor, statement, *rest: statements.append(statement))
    status = JobStatus(work.catalogue)
    begun = time.monotonic()
    while time.monotonic() - begun < 4 * CANCEL_SECONDS:
        assert status(job_id) == "queued"
    assert 2 <= sum("job.status" in statement for statement in statements) <= 5
    with work.catalogue.write() as session:
        cancel(session, job_id)
    time.sleep(CANCEL_SECONDS)
    assert status(job_id) == "cancelled"


def test_a_worker_has_so_many_files_in_hand_and_one_ahead_and_no_more(watched: Watched) -> None:
    held = first_is_held(watched, lambda: watched.leased > IN_HAND)
    many(watched.work, 2 * IN_HAND)
    watched.worker.drain()
    assert held == [IN_HAND + 1]


def test_large_files_are_not_in_hand_together(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand, "TEXT_IN_HAND", 200)
    held = first_is_held(watched, lambda: watched.leased > 1)
    many(watched.work, 4, words=60)
    watched.worker.drain()
    assert held == [2]
    assert len(watched.batches) == 4


def test_a_text_that_cannot_be_embedded_fails_its_own_file_alone(watched: Watched) -> None:
    first_is_held(watched, lambda: watched.leased > 3)
    texts = {"a.txt": "first", "b.txt": "POISON", "c.txt": "third", "d.txt": "fourth"}
    watched.work.upload(watched.work.corpus(), texts)
    watched.worker.drain()
    assert done(watched.work) == ["a.txt", "c.txt", "d.txt"]
    assert watched.work.count(JobFile, JobFile.error_code == "embedding_failed") == 1


def test_nothing_is_committed_without_its_vectors(watched: Watched) -> None:
    first_is_held(watched, lambda: watched.leased > 3)
    seen: list[int] = []
    embedding = watched.embedding

    def embed(text: str) -> None:
        embedding(text)
        seen.append(watched.work.count(ChunkRow))

    watched.embedding = embed
    many(watched.work, 4)
    watched.worker.drain()
    assert seen[0] == 0
    assert watched.work.count(ChunkRow) == 4


def test_an_encoder_that_breaks_down_altogether_leaves_no_file_waiting(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: EmbedQueue, texts: Sequence[str]) -> list[list[float] | None]:
        raise SystemError("broken")

    monkeypatch.setattr(EmbedQueue, "_batch", broken)
    many(watched.work, 3)
    watched.worker.drain()
    assert watched.work.count(JobFile, JobFile.status == "failed") == 3


def test_a_file_in_hand_is_cancelled_while_another_is_embedded(watched: Watched) -> None:
    other: list[str] = []

    def embedding(text: str) -> None:
        if text.endswith("first"):
            wait_for(lambda: watched.leased == 3, "all in hand")
            with watched.work.catalogue.write() as session:
                cancel(session, other[0])
            wait_for(lambda: status_of(watched.work, other[0]) == "cancelled", "the end of the other job")

    watched.embedding = embedding
    watched.work.upload(watched.work.corpus("a", "t1"), {"a.txt": "first", "b.txt": "second"})
    other.append(watched.work.upload(watched.work.corpus("b", "t2"), {"other.txt": "third"}))
    watched.worker.drain()
    assert done(watched.work) == ["a.txt", "b.txt"]
    assert "third" not in [word for batch in watched.batches for word in batch]


def test_a_file_that_waits_for_its_turn_is_cancelled_at_once(watched: Watched) -> None:
    other: list[str] = []

    def embedding(text: str) -> None:
        watched.until("parse other.txt")
        with watched.work.catalogue.write() as session:
            cancel(session, other[0])
        wait_for(lambda: status_of(watched.work, other[0]) == "cancelled", "the end of the other job")

    watched.embedding = embedding
    watched.work.upload(watched.work.corpus("a", "t1"), {"a.txt": "first"})
    other.append(watched.work.upload(watched.work.corpus("b", "t2"), {"other.txt": "second"}))
    watched.worker.drain()
    assert watched.work.count(JobFile, JobFile.status == "done") == 1
    assert watched.work.count(ChunkRow) == 1


def status_of(work: Work, job_id: str) -> str:
    with work.catalogue.read() as session:
        return str(session.get_one(Job, job_id).status)


def test_a_lease_is_renewed_while_a_file_waits_for_its_turn(work: Work) -> None:
    work.lease_seconds = 2.0
    watched = Watched(work)

    def embedding(text: str) -> None:
        watched.until("parse b.txt")
        end = time.monotonic() + 5
        while time.monotonic() < end:
            with work.catalogue.write() as session:
                reap(session)
            time.sleep(0.1)

    watched.embedding = embedding
    work.upload(work.corpus(), {"a.txt": "first", "b.txt": "second"})
    watched.worker.drain()
    assert work.count(JobFile, JobFile.status == "done", JobFile.attempt == 0) == 2


def test_a_file_that_failed_before_is_worked_on_alone(watched: Watched) -> None:
    """It may have killed its worker: the next file is not to be taken along."""
    three(watched.work)
    with watched.work.catalogue.write() as session:
        session.query(JobFile).filter(JobFile.path == "a.txt").update({"attempt": 1})
    held: list[int] = []

    def embedding(text: str) -> None:
        if text.endswith("first"):
            time.sleep(0.3)  # time enough to take a second file
            held.append(watched.leased)

    watched.embedding = embedding
    watched.worker.drain()
    assert held == [1]
    assert watched.work.count(JobFile, JobFile.status == "done") == 3


def test_a_file_that_failed_before_is_not_claimed_beside_another(watched: Watched) -> None:
    """Nor is it passed over: it comes next, alone."""
    three(watched.work)
    with watched.work.catalogue.write() as session:
        session.query(JobFile).filter(JobFile.path == "b.txt").update({"attempt": 1})
    held: list[int] = []

    def embedding(text: str) -> None:
        time.sleep(0.3)  # time enough to take a second file
        held.append(watched.leased)

    watched.embedding = embedding
    assert watched.worker.drain() == 3
    assert held == [1, 1, 1]
    assert [event for event in watched.events if event.startswith("parse")] == ["parse a.txt", "parse b.txt", "parse c.txt"]


@pytest.mark.parametrize("cancelling", [False, True])
def test_a_worker_that_breaks_down_gives_the_file_ahead_back_at_once(work: Work, cancelling: bool) -> None:
    work.lease_seconds = 600.0
    watched = Watched(work)
    bell = threading.Event()

    def ring(queue: str) -> None:
        if not bell.is_set():
            bell.set()
            watched.until("parse b.txt")
            if cancelling:
                with work.catalogue.write() as session:
                    session.query(Job).update({"status": "cancelling"})
            raise OSError("no bell")

    watched.worker.ring = ring
    three(work)
    with pytest.raises(OSError, match="no bell"):
        watched.worker.drain()

    assert watched.leased == work.count(JobFile, JobFile.lease_owner.is_not(None)) == 0
    if cancelling:
        assert work.count(JobFile, JobFile.path == "b.txt", JobFile.status == "cancelled") == 1
        return
    assert work.count(JobFile, JobFile.path == "b.txt", JobFile.status == "pending", JobFile.attempt == 0) == 1
    assert watched.worker.drain() == 2
    assert work.count(JobFile, JobFile.status == "done") == 3
    assert work.count(ChunkRow) == 3


def test_an_archives_files_are_found_behind_the_last_file_ahead(work: Work) -> None:
    import io
    import zipfile

    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in ("x.txt", "y.txt"):
            archive.writestr(name, f"text of {name}")
    work.upload(work.corpus(), {"all.zip": data.getvalue()})
    assert work.worker().drain() == 3
    assert work.count(ChunkRow) == 2
