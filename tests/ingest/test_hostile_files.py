"""Files made to make ingest fall. Whatever comes, a file is searchable or has failed with a code that is its own."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hostile_kit
import pytest
from fixtures_work import Work
from sqlalchemy import select

from ingest.files import raw_name
from ingest.isolate import ParserPool
from ingest.planner import SourcePlanner
from ingest.sources import Reach
from ingest.sync import queue_sync
from storage.catalogue.schema import ChunkRow, Corpus, Document, File, Job, JobFile
from storage.errors import FILE_ERROR_CODES

SEEDS = [int(seed) for seed in os.environ.get("HOSTILE_SEEDS", "1").split(",")]
FILES = len(hostile_kit.CONTENTS)
# Whose fault it is: those of the service, and a parser that broke down, are none that a file may cause here.
OURS = {"worker_lost", "storage_error", "embedding_failed", "kv_failed", "parser_crash", "cancelled"}


@pytest.fixture
def real(work: Work) -> Iterator[Work]:
    """With the real parsers in their children, and chunks of the usual size."""
    with ParserPool(wall_s=600) as pool:  # the clock of a busy machine is not what is tested here
        work.parser, work.max_tokens, work.lease_seconds = pool, 400, 600.0  # type: ignore[assignment]
        yield work


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_files_cost_themselves_only_and_the_same_each_time(real: Work, seed: int) -> None:
    corpus, given = real.corpus(), hostile_kit.files(seed, FILES)
    first = ends(real, real.ingest(corpus, dict(given)))
    real.compute_kv()
    with real.catalogue.read() as session:
        held = {document.path: document for document in session.scalars(select(Document))}
        chunks: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for document_id, ordinal, text in session.execute(select(ChunkRow.document_id, ChunkRow.ordinal, ChunkRow.text)):
            chunks[document_id].append((ordinal, text))
        assert set(session.scalars(select(Job.status))) == {"completed_with_errors"}
        names = {raw_name(file.tenant_id, file.sha256) for file in session.scalars(select(File))}
    assert held.keys() >= given.keys(), "names come back letter by letter"
    assert set(real.objects.list("raw/")) == names
    for path, (status, code, message) in first.items():
        if status == "failed":
            assert code in FILE_ERROR_CODES - OURS, (path, code, message)
            assert message
        found = sorted(chunks[held[path].id])
        assert [ordinal for ordinal, _ in found] == list(range(len(found)))
        assert all(text.strip() and "\0" not in text for _, text in found)
        assert not (status == "failed" and found)
    again = ends(real, real.ingest(corpus, dict(given)))
    assert {path: code for path, (_, code, _) in again.items()} == {path: first[path][1] for path in again}
    assert {status for status, _, _ in again.values()} <= {"unchanged", "failed"}


def ends(work: Work, job: str) -> dict[str, tuple[str, str | None, str | None]]:
    """How each file of a job has ended."""
    with work.catalogue.read() as session:
        rows = session.scalars(select(JobFile).where(JobFile.job_id == job)).all()
    return {row.path: (row.status, row.error_code, row.error_message) for row in rows}


@pytest.mark.parametrize("seed", SEEDS)
def test_names_of_any_letters_are_synced_and_known_again(work: Work, tmp_path: Path, seed: int) -> None:
    dice, root = random.Random(seed), tmp_path / "docs"
    root.mkdir()
    names = {hostile_kit.name(dice) for _ in range(12)} | {"x" * 255, "\n", "\u202e.txt", "é", "e\u0301", "-rf", " "}
    for name in names:
        (root / name).write_text("words of " + name)
    corpus = work.corpus(source={"type": "folder", "path": str(root)})
    planner = SourcePlanner(work.catalogue, work.objects, Reach([str(tmp_path)]), work.pipeline.done_hash)
    for expected in (len(names), 0):
        with work.catalogue.write() as session:
            job = queue_sync(session, session.get_one(Corpus, corpus.id)).id
        work.worker(planner=planner).drain()
        assert work.view(job)["progress"]["files_done"] == work.view(job)["progress"]["files_total"] == expected
    with work.catalogue.read() as session:
        assert set(session.scalars(select(Document.path))) == names


def test_a_member_whose_name_is_text_in_no_encoding_is_left_out_and_named(work: Work) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", encoding="latin-1", format=tarfile.GNU_FORMAT) as archive:
        for name in ("caf\xe9.txt", "fine.txt"):
            info = tarfile.TarInfo(name)
            info.size = 5
            archive.addfile(info, io.BytesIO(b"words"))
    corpus = work.corpus()
    job = work.ingest(corpus, {"old.tar": data.getvalue()})
    work.compute_kv()
    shown = work.view(job)
    assert shown["status"] == "completed"
    [warning] = shown["warnings"]
    assert "its name is not text" in warning["message"]
    assert work.chunks(corpus, "old.tar!/fine.txt") == ["words"]
