"""Doing a file again: what changed is replaced, what did not costs nothing, what died is done again."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from fixtures_work import Work, paragraphs
from sqlalchemy import select, update

from ingest.jobs import cancel
from ingest.leases import claim_file
from ingest.ticker import reap
from storage.catalogue.engine import open_catalogue
from storage.catalogue.schema import ChunkRow, Document, File, JobFile, KVObject


def test_an_edited_document_answers_with_its_new_text_only(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"rules.txt": "The limit is 10 euro.\n\nNothing else is said."})
    work.ingest(corpus, {"rules.txt": "The limit is 20 euro.\n\nNothing else is said."})
    second = type(work)(open_catalogue(str(work.catalogue.engine.url)), work.objects, work.index, work.parser)
    dense, lexical = second.search(corpus, "limit 10 euro")
    second.catalogue.close()
    assert "10" not in " ".join(dense + lexical)
    assert "The limit is 20 euro." in " ".join(lexical)
    document = work.document(corpus, "rules.txt")
    assert document is not None
    assert document.generation == 2


def test_ten_chunks_become_two_in_both_indexes(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(10)})
    work.compute_kv()
    job = work.ingest(corpus, {"a.txt": paragraphs(2)})
    dense, lexical = work.search(corpus, " ".join(f"p{i}w1" for i in range(10)))
    assert len(work.chunks(corpus)) == len(dense) == len(lexical) == 2
    progress = work.view(job)["progress"]
    assert (progress["chunks_total"], progress["chunks_reused"], progress["kv_bytes_reused"]) == (2, 2, 20)
    assert len(work.deleted) == 8, "the KV of what is gone was deleted"
    assert work.count(KVObject) == 2
    assert work.view(job)["status"] == "completed"


def test_a_changed_paragraph_recomputes_its_chunk_only(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(6)})
    work.compute_kv()
    job = work.ingest(corpus, {"a.txt": paragraphs(6).replace("p3w5", "changed")})
    assert work.view(job)["progress"]["chunks_reused"] == 5
    assert work.compute_kv() == 1


def test_the_same_file_again_is_unchanged_and_not_even_parsed(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(3)})
    work.compute_kv()
    job = work.ingest(corpus, {"a.txt": paragraphs(3)})
    shown = work.view(job)
    assert shown["status"] == "completed"
    assert (shown["progress"]["files_unchanged"], shown["progress"]["chunks_reused"]) == (1, 3)
    assert shown["progress"]["kv_bytes_reused"] == 30
    assert work.parser.parsed == ["a.txt"]
    assert work.count(File) == 1


def test_a_changed_chunk_size_rebuilds(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(4)})
    assert len(work.chunks(corpus)) == 4
    work.max_tokens = 60
    job = work.ingest(corpus, {"a.txt": paragraphs(4)})
    assert len(work.chunks(corpus)) == 1
    assert work.view(job)["progress"]["files_done"] == 1


def test_unchanged_text_whose_kv_is_gone_owes_it_again(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(3)})
    work.compute_kv()
    with work.catalogue.write() as session:
        session.delete(session.scalars(select(KVObject)).first())
    job = work.ingest(corpus, {"a.txt": paragraphs(3)})
    assert work.view(job)["status"] == "in_progress"
    assert work.view(job)["progress"]["chunks_reused"] == 2
    assert work.compute_kv() == 1
    assert work.view(job)["status"] == "completed"


def test_same_names_in_two_folders_and_same_bytes_under_two_names(work: Work) -> None:
    corpus = work.corpus()
    text = paragraphs(3)
    job = work.ingest(corpus, {"a/report.txt": text, "b/report.txt": text, "b/other.txt": "different words"})
    assert work.count(Document) == 3
    assert len(work.chunks(corpus)) == 7
    assert work.compute_kv() == 4, "the same bytes are computed once"
    assert work.view(job)["progress"]["chunks_reused"] == 3
    assert len(list(work.objects.list("raw/"))) == 2, "the same bytes are stored once"


def test_a_paragraph_that_repeats_in_a_document_is_computed_once(work: Work) -> None:
    corpus = work.corpus()
    line = paragraphs(1)
    work.ingest(corpus, {"a.txt": f"{line}\n\n{paragraphs(1, tag='q')}\n\n{line}"})
    assert len(work.chunks(corpus)) == 3
    assert work.compute_kv() == 2


def test_tenants_never_share_kv_unless_the_corpus_is_shared(work: Work) -> None:
    text = paragraphs(2)
    work.ingest(work.corpus("a", "t1"), {"a.txt": text})
    work.ingest(work.corpus("a", "t2"), {"a.txt": text})
    assert work.count(KVObject) == 4


def test_a_failed_update_keeps_the_old_text_and_is_tried_again(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "good text"})
    work.ingest(corpus, {"a.txt": "ERROR invalid_file"})
    assert work.chunks(corpus) == ["good text"]
    document = work.document(corpus, "a.txt")
    assert document is not None
    assert document.status == "failed"
    with work.catalogue.read() as session:
        file = session.get_one(File, document.file_id)
    assert file.sha256 == document.sha256, "the document still names the file that its text is from"
    job = work.ingest(corpus, {"a.txt": "good text"})
    assert work.view(job)["progress"]["files_unchanged"] == 1


def test_a_cancelled_update_keeps_the_old_text(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "old text"})
    job = work.upload(corpus, {"a.txt": "new text"})
    with work.catalogue.write() as session:
        cancel(session, job)
    document = work.document(corpus, "a.txt")
    assert document is not None
    assert document.status == "completed"
    assert work.chunks(corpus) == ["old text"]


DIES_AT_THREE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from fixtures_work import open_work
work = open_work(Path(sys.argv[1]))
real = work.index.add

def dies(session, corpus_id, rows):
    real(session, corpus_id, rows[:3])
    print(len(rows), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

work.index.add = dies
work.worker("doomed").drain()
"""


def test_kill_9_at_chunk_three_of_five_leaves_nothing_and_the_next_run_all_five(work: Work, tmp_path: Path) -> None:
    corpus = work.corpus()
    job = work.upload(corpus, {"a.txt": paragraphs(5)})
    tests = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", DIES_AT_THREE, str(tmp_path), str(tests)]
    killed = subprocess.run(command, cwd=tests.parent, stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (killed.returncode, killed.stdout.split()[-1]) == (-signal.SIGKILL, "5")
    assert work.chunks(corpus) == []
    document = work.document(corpus, "a.txt")
    assert document is not None
    assert document.done_hash is None
    with work.catalogue.write() as session:
        session.execute(update(JobFile).values(lease_expires=time.time() - 1))
        reap(session)
    work.worker("w2").drain()
    assert len(work.chunks(corpus)) == 5
    assert [len(found) for found in work.search(corpus, " ".join(f"p{i}w1" for i in range(5)))] == [5, 5]
    work.compute_kv()
    assert work.view(job)["status"] == "completed"


def test_running_a_file_twice_stores_it_once(work: Work) -> None:
    corpus = work.corpus()
    work.upload(corpus, {"a.txt": paragraphs(3)})
    slow = claim_file(work.catalogue, "slow", 5)
    assert slow is not None
    with work.catalogue.write() as session:  # as if its lease had run out
        session.execute(update(JobFile).values(lease_expires=time.time() - 1))
        reap(session)
    work.worker("fast").drain()
    work.pipeline.process(slow)
    assert len(work.chunks(corpus)) == 3
    document = work.document(corpus, "a.txt")
    assert document is not None
    assert document.generation == 1


def test_who_lost_the_lease_stores_nothing_while_another_works(work: Work) -> None:
    corpus = work.corpus()
    work.upload(corpus, {"a.txt": paragraphs(3)})
    slow = claim_file(work.catalogue, "slow", 5)
    with work.catalogue.write() as session:
        session.execute(update(JobFile).values(lease_expires=time.time() - 1))
        reap(session)
    fast = claim_file(work.catalogue, "fast", 5)
    assert slow is not None
    assert fast is not None
    work.pipeline.process(slow)
    assert work.chunks(corpus) == []
    work.pipeline.process(fast)
    assert len(work.chunks(corpus)) == 3


def test_a_fault_of_ours_is_tried_three_times_and_then_reported(work: Work) -> None:
    corpus = work.corpus()

    def fault(name: str) -> None:
        if name == "bad.txt":
            raise RuntimeError("a bug")

    work.parser.accident = fault
    job = work.ingest(corpus, {"bad.txt": "x", "good.txt": "y"})
    work.compute_kv()
    assert work.parser.parsed.count("bad.txt") == 3
    [error] = work.view(job)["errors"]
    assert (error["code"], error["retryable"]) == ("worker_lost", True)
    assert "RuntimeError" in error["message"]
    assert "a bug" not in error["message"], "an exception's text may hold the document's"


def test_a_lost_raw_object_fails_the_file(work: Work) -> None:
    job = work.upload(work.corpus(), {"a.txt": "text"})
    for name in list(work.objects.list("raw/")):
        work.objects.delete(name)
    work.worker().drain()
    assert work.view(job)["errors"][0]["code"] == "storage_error"


DOOMED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from fixtures_work import open_work
work = open_work(Path(sys.argv[1]))
def die(name):
    print("parsing", name, flush=True)
    {how}
work.parser.accident = die
work.lease_seconds = 0.6
work.worker("doomed").drain()
"""


def doomed(folder: Path, how: str) -> subprocess.Popen[str]:
    """A worker in a process of its own, that does `how` while it parses."""
    tests = Path(__file__).resolve().parent.parent
    code = DOOMED.format(how=how)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(tests)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tests.parent,
    )


def test_kill_9_in_the_middle_of_a_job_and_another_worker_finishes(work: Work, tmp_path: Path) -> None:
    corpus = work.corpus()
    job = work.upload(corpus, {f"{i}.txt": paragraphs(2, tag=f"f{i}x") for i in range(4)})
    how = "if name == '2.txt': import time; time.sleep(60)"
    with doomed(tmp_path, how) as process:
        assert process.stdout is not None
        while "2.txt" not in process.stdout.readline():
            pass
        time.sleep(1.0)  # longer than its lease: the heartbeat keeps it
        with work.catalogue.write() as session:
            assert reap(session) == set()
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.8)
    with work.catalogue.write() as session:
        assert reap(session) == {job}
    work.worker("heir").drain()
    work.compute_kv()
    assert work.view(job)["status"] == "completed"
    assert sorted(work.chunks(corpus)) == sorted(
        text for i in range(4) for text in paragraphs(2, tag=f"f{i}x").split("\n\n")
    )
    assert work.view(job)["attempt"] == 2


def test_a_file_that_kills_its_worker_is_delivered_three_times_and_no_more(
    work: Work, tmp_path: Path
) -> None:
    job = work.upload(work.corpus(), {"a.txt": "deadly"})
    for delivery in (1, 2, 3):
        with doomed(tmp_path, "os._exit(9)") as process:
            assert process.wait(30) == 9
        assert work.view(job)["status"] == "in_progress"
        assert work.view(job)["attempt"] == delivery
        with work.catalogue.write() as session:
            session.execute(update(JobFile).values(lease_expires=time.time() - 1))
            reap(session)
    assert work.worker().drain() == 0
    shown = work.view(job)
    assert (shown["status"], shown["errors"][0]["code"]) == ("failed", "worker_lost")


def zip_of(files: dict[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def test_the_files_of_an_archive_are_documents_of_their_own(work: Work) -> None:
    corpus = work.corpus()
    data = zip_of({"docs/a.txt": "alpha text", "docs/b.txt": "beta text", "x.bin": b"\0\1\2"})
    job = work.ingest(corpus, {"all.zip": data})
    work.compute_kv()
    assert work.chunks(corpus) == ["alpha text", "beta text"]
    assert work.view(job)["progress"]["files_done"] == 3
    archive = work.document(corpus, "all.zip")
    assert archive is not None
    assert "x.bin: binary" in str(archive.error_message)
    assert archive.status == "completed"
    assert work.document(corpus, "all.zip!/docs/a.txt") is not None
    again = work.ingest(corpus, {"all.zip": zip_of({"docs/a.txt": "alpha text", "docs/c.txt": "gamma text"})})
    work.compute_kv()
    assert work.chunks(corpus) == ["alpha text", "gamma text"]
    assert work.view(again)["progress"]["files_unchanged"] == 1
    receipt = work.deleter.document("t1", archive.id)
    assert receipt["documents"] == 3
    assert work.count(Document) == 0
    assert work.count(ChunkRow) == 0


def test_an_archive_without_a_readable_file_fails(work: Work) -> None:
    job = work.ingest(work.corpus(), {"all.zip": zip_of({"x.bin": b"\0\1\2"})})
    assert work.view(job)["errors"][0]["code"] == "no_text_extracted"
