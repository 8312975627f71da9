"""Syncs: the diff says what is to happen, the job does that and nothing more."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fixtures_work import WordEmbedder, Work, paragraphs
from sqlalchemy import update

from ingest.files import store_file
from ingest.jobs import cancel, queue_refresh, retry
from ingest.leases import claim_file
from ingest.planner import SourcePlanner
from ingest.sources import Asker, Entry, Reach, open_source
from ingest.sync import offer, queue_sync, sync_manifest
from ingest.ticker import expire_uploads
from retrieval.search import Retriever
from storage.catalogue.schema import Corpus, Document, File, Job, JobFile, KVObject
from storage.errors import StorageUnavailable, UserError


def manifest_of(files: dict[str, str]) -> list[Entry]:
    return [
        Entry(path, hashlib.sha256(text.encode()).hexdigest(), len(text.encode()))
        for path, text in files.items()
    ]


def sync(work: Work, corpus: Corpus, files: dict[str, str], **options: Any) -> dict[str, Any]:
    options = {"delete_missing": True, "done_hash": work.pipeline.done_hash, **options}
    return sync_manifest(work.catalogue, lambda session: session.get_one(Corpus, corpus.id), manifest_of(files), **options)


def give(work: Work, name: str, text: str, tenant: str = "t1") -> set[str]:
    file = store_file(work.catalogue, work.objects, tenant, name, text.encode())
    with work.catalogue.write() as session:
        return offer(session, file)


OLD = {"same.txt": "stays", "edit.txt": "before", "gone.txt": "goes", "old/name.txt": paragraphs(3)}
NEW = {"same.txt": "stays", "edit.txt": "after", "new.txt": "comes", "new/name.txt": paragraphs(3)}


def test_the_diff_names_every_kind_and_a_dry_run_changes_nothing(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, OLD)
    jobs = work.count(Job)
    found = sync(work, corpus, NEW, dry_run=True)
    assert found == {
        "added": ["new.txt"],
        "modified": ["edit.txt"],
        "renamed": [{"from": "old/name.txt", "to": "new/name.txt"}],
        "deleted": ["gone.txt"],
        "unchanged_count": 1,
        "job_id": None,
    }
    assert work.count(Job) == jobs
    kept = sync(work, corpus, NEW, dry_run=True, delete_missing=False)
    assert (kept["deleted"], kept["renamed"]) == ([], [])
    assert sorted(kept["added"]) == ["new.txt", "new/name.txt"]


def test_a_manifest_is_carried_out_as_contents_arrive(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, OLD)
    work.compute_kv()
    work.corpus(tenant="t2")
    job = sync(work, corpus, NEW)["job_id"]
    work.worker().drain()
    assert work.view(job)["status"] == "in_progress", "two contents are still to come"
    assert work.document(corpus, "gone.txt") is None
    assert give(work, "new.txt", "comes", tenant="t2") == set(), "another tenant's upload is not this one's"
    assert give(work, "edit.txt", "after") == {job}
    assert give(work, "whatever the name", "comes") == {job}
    work.worker().drain()
    work.compute_kv()
    shown = work.view(job)
    assert shown["status"] == "completed"
    assert sorted(work.chunks(corpus)) == sorted(["stays", "after", "comes", *paragraphs(3).split("\n\n")])
    assert sync(work, corpus, NEW, dry_run=True)["unchanged_count"] == 4


def test_a_rename_costs_nothing(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": paragraphs(3), "b.txt": "other"})
    work.compute_kv()
    before = work.document(corpus, "a.txt")
    parsed = list(work.parser.parsed)
    job = sync(work, corpus, {"moved/c.txt": paragraphs(3), "b.txt": "other"})["job_id"]
    work.worker().drain()
    assert work.view(job)["status"] == "completed"
    after = work.document(corpus, "moved/c.txt")
    assert before is not None
    assert after is not None
    assert (after.id, after.generation) == (before.id, before.generation)
    assert work.parser.parsed == parsed
    assert work.count(KVObject, KVObject.status != "done") == 0
    assert work.deleted == []
    again = sync(work, corpus, {"moved/c.txt": paragraphs(3), "b.txt": "other"}, dry_run=True)
    assert (again["modified"], again["unchanged_count"]) == ([], 2)


def test_a_renamed_document_is_found_by_its_new_name(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"fiverr.txt": paragraphs(3), "b.txt": "other"})
    sync(work, corpus, {"groupon.txt": paragraphs(3), "b.txt": "other"})
    work.worker().drain()
    retriever = Retriever(work.catalogue, work.index.real, WordEmbedder())
    ask = {"tenant_id": "t1", "corpus_ids": [corpus.id], "top_k": 50, "mode": "lexical"}
    assert retriever.search(**ask, query="fiverr") == []
    assert len(retriever.search(**ask, query="groupon")) == len(work.chunks(corpus, "groupon.txt")) > 0


@pytest.mark.parametrize("name", ["Makefile", ".env", "LICENSE"])
def test_a_renamed_file_without_a_suffix_is_unchanged_at_the_next_sync(work: Work, name: str) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"README": paragraphs(2), "b.txt": "other"})
    sync(work, corpus, {name: paragraphs(2), "b.txt": "other"})
    work.worker().drain()
    assert sync(work, corpus, {name: paragraphs(2), "b.txt": "other"}, dry_run=True)["unchanged_count"] == 2


def test_a_new_suffix_is_no_rename(work: Work) -> None:
    """Another suffix may mean another parser."""
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "text"})
    found = sync(work, corpus, {"a.md": "text"}, dry_run=True)
    assert (found["renamed"], found["added"], found["deleted"]) == ([], ["a.md"], ["a.txt"])


def test_two_files_that_swap_contents_are_both_modified(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "one", "b.txt": "two"})
    job = sync(work, corpus, {"a.txt": "two", "b.txt": "one"})["job_id"]
    work.worker().drain()
    work.compute_kv()
    assert work.view(job)["status"] == "completed", "both contents are in the corpus: nothing to upload"
    assert work.chunks(corpus, "a.txt") == ["two"]
    assert work.chunks(corpus, "b.txt") == ["one"]


def test_a_failed_document_is_modified_until_it_succeeds(work: Work) -> None:
    corpus = work.corpus()
    files = {"a.txt": "ERROR parser_timeout"}
    work.ingest(corpus, files)
    assert sync(work, corpus, files, dry_run=True)["modified"] == ["a.txt"]


def test_other_chunk_settings_make_every_document_modified(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, OLD)
    work.max_tokens = 60
    assert len(sync(work, corpus, OLD, dry_run=True)["modified"]) == len(OLD)
    with work.catalogue.write() as session:
        job = queue_refresh(session, session.get_one(Corpus, corpus.id), session.query(Document).all()).id
    work.worker().drain()
    assert len(work.chunks(corpus, "old/name.txt")) == 1
    assert work.view(job)["progress"]["files_done"] == len(OLD)


def test_a_refresh_undoes_no_content_that_is_on_its_way(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "the limit is 10", "b.txt": "stays"})
    work.upload(corpus, {"a.txt": "the limit is 20"})
    work.max_tokens = 60
    with work.catalogue.write() as session:
        job = queue_refresh(session, session.get_one(Corpus, corpus.id), session.query(Document).all()).id
    work.worker().drain()
    assert work.chunks(corpus) == ["the limit is 20", "stays"]
    shown = work.view(job)["progress"]
    assert (shown["files_done"], shown["files_unchanged"]) == (1, 1), "the new content was made as it is made now"


def test_a_refresh_that_is_overtaken_makes_what_the_document_holds_by_then(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "the limit is 10"})
    entry = sync(work, corpus, {"a.txt": "the limit is 20"})
    work.max_tokens = 60
    with work.catalogue.write() as session:
        queue_refresh(session, session.get_one(Corpus, corpus.id), session.query(Document).all())
    lease = claim_file(work.catalogue, "slow", 60)
    assert lease is not None
    run = work.pipeline.begin(lease)  # has read the old content
    give(work, "a.txt", "the limit is 20")
    work.worker("quick").drain()
    assert work.chunks(corpus) == ["the limit is 20"]
    run.finish()
    assert work.chunks(corpus) == ["the limit is 20"]
    with work.catalogue.write() as session:
        session.execute(update(JobFile).where(JobFile.status == "pending").values(lease_expires=None))
    work.worker().drain()
    work.compute_kv()
    assert work.chunks(corpus) == ["the limit is 20"]
    assert work.view(entry["job_id"])["status"] == "completed"
    assert work.count(JobFile, JobFile.status.in_(("done", "unchanged"))) == 3


def test_a_path_twice_in_a_manifest_is_refused(work: Work) -> None:
    corpus = work.corpus()
    entry = Entry("a.txt", "0" * 64, 1)
    with pytest.raises(UserError, match="twice"):
        sync_manifest(
            work.catalogue, lambda _: corpus, [entry, entry], delete_missing=False, done_hash=work.pipeline.done_hash
        )


def test_a_content_that_never_comes_does_not_hold_its_job_for_ever(work: Work) -> None:
    corpus = work.corpus()
    job = sync(work, corpus, {"a.txt": "never sent"})["job_id"]
    with work.catalogue.write() as session:
        assert expire_uploads(session) == 0
        session.execute(update(Job).values(created_at=Job.created_at - 25 * 3600))
        assert expire_uploads(session) == 1
    work.compute_kv()
    assert work.view(job)["errors"][0]["code"] == "cancelled"


# --- sources ---


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def run_source(work: Work, corpus: Corpus, roots: list[Path]) -> str:
    with work.catalogue.write() as session:
        job = queue_sync(session, session.get_one(Corpus, corpus.id)).id
    assert work.view(job)["stage"] == "fetch"
    work.worker(planner=planner(work, roots)).drain()
    work.compute_kv()
    return job


def planner(work: Work, roots: list[Path]) -> SourcePlanner:
    return SourcePlanner(work.catalogue, work.objects, Reach([str(r) for r in roots]), work.pipeline.done_hash)


def test_a_folder_is_mirrored_and_only_changes_are_read_again(work: Work, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    write(folder, OLD)
    (folder / "link.txt").symlink_to(folder / "same.txt")
    corpus = work.corpus(source={"type": "folder", "path": str(folder)})
    job = run_source(work, corpus, [tmp_path])
    assert work.view(job)["status"] == "completed"
    assert work.count(Document) == 4
    with work.catalogue.read() as session:
        result = session.get_one(Job, job).result["sync"]
    assert {"path": "link.txt", "reason": "symlink"} in result["skipped"]
    (folder / "gone.txt").unlink()
    (folder / "old" / "name.txt").rename(folder / "moved.txt")
    write(folder, {"edit.txt": "after"})
    parsed = len(work.parser.parsed)
    again = run_source(work, corpus, [tmp_path])
    assert work.view(again)["status"] == "completed"
    assert work.parser.parsed[parsed:] == ["edit.txt"]
    assert sorted(work.chunks(corpus)) == sorted(["stays", "after", *paragraphs(3).split("\n\n")])
    assert work.count(File) == 3, "contents that no document needs are gone"
    assert len(list(work.objects.list("raw/"))) == 3
    third = run_source(work, corpus, [tmp_path])
    assert work.view(third)["progress"]["files_total"] == 0
    assert work.view(third)["status"] == "completed"


def test_a_git_repository_is_synced_at_a_commit(work: Work, tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    write(folder, {"a.txt": "committed"})
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    subprocess.run([*git, "add", "a.txt"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    write(folder, {"a.txt": "not committed"})
    corpus = work.corpus(source={"type": "git", "path": str(folder), "ref": "main"})
    assert work.view(run_source(work, corpus, [tmp_path]))["status"] == "completed"
    assert work.chunks(corpus) == ["committed"]


@pytest.mark.parametrize("where", ["outside", "link", "prefix", "nothing allowed"])
def test_a_source_outside_the_allowed_folders_is_refused(work: Work, tmp_path: Path, where: str) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "allowed-secret"
    write(allowed, {"a.txt": "public"})
    write(secret, {"b.txt": "secret"})
    (allowed / "link").symlink_to(secret)
    path = {"outside": secret, "link": allowed / "link", "prefix": f"{allowed}/../allowed-secret"}.get(
        where, allowed
    )
    roots = [] if where == "nothing allowed" else [allowed]
    corpus = work.corpus(source={"type": "folder", "path": str(path)})
    job = run_source(work, corpus, roots)
    shown = work.view(job)
    assert shown["status"] == "failed"
    assert "may read" in shown["errors"][0]["message"]
    assert work.count(Document) == 0


@pytest.mark.parametrize(
    "source", [{}, {"type": "url", "path": "x"}, {"type": "folder"}, {"type": "git", "path": 3}]
)
def test_a_source_of_another_kind_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        open_source(source, Reach(["/"]), Asker("t1"))


def test_a_store_that_is_down_delays_a_sync_and_does_not_lose_it(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "docs"
    write(folder, {"a.txt": "text"})
    corpus = work.corpus(source={"type": "folder", "path": str(folder)})

    def down(*args: object) -> None:
        raise StorageUnavailable("down")

    with monkeypatch.context() as patch:
        patch.setattr(work.objects, "put", down)
        job = run_source(work, corpus, [tmp_path])
    assert work.view(job)["status"] == "in_progress"
    assert work.worker(planner=planner(work, [tmp_path])).drain() == 0, "not at once"
    with work.catalogue.write() as session:
        session.execute(update(Job).values(lease_expires=0.0))
    work.worker(planner=planner(work, [tmp_path])).drain()
    work.compute_kv()
    assert work.view(job)["status"] == "completed"


def test_a_cancelled_sync_stops_between_files_and_can_be_retried(work: Work, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    write(folder, {f"{i}.txt": f"text {i}" for i in range(5)})
    corpus = work.corpus(source={"type": "folder", "path": str(folder)})
    with work.catalogue.write() as session:
        job = queue_sync(session, session.get_one(Corpus, corpus.id)).id
    put = work.objects.put

    def put_and_cancel(name: str, parts: Any) -> int:
        with work.catalogue.write() as session:
            cancel(session, job)
        return int(put(name, parts))

    work.objects.put = put_and_cancel
    work.worker(planner=planner(work, [tmp_path])).drain()
    work.objects.put = put
    assert work.view(job)["status"] == "cancelled"
    assert work.count(JobFile) == 0
    assert work.count(File) == 0, "what was stored until then is for nobody"
    with work.catalogue.write() as session:
        again = retry(session, job).id
    work.worker(planner=planner(work, [tmp_path])).drain()
    assert work.view(again)["progress"]["files_done"] == 5
