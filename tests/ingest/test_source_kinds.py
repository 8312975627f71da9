"""Every kind of source: mirrored, compared, and never taken for empty because it does not answer."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from fixtures_s3 import S3Server, s3_client
from fixtures_web import Reply, web
from fixtures_work import Work, paragraphs
from git_kit import backend

from ingest.egress import AllowedHosts
from ingest.planner import SourcePlanner
from ingest.schedules import create_schedule, tick
from ingest.sources import KINDS, Reach
from ingest.sync import queue_sync
from storage.catalogue.schema import Corpus, Document, Job, JobFile

FILES = {"same.txt": "stays", "edit.txt": "before", "gone.txt": "goes", "old/name.txt": paragraphs(3)}


class FolderOrigin:
    """A folder, as what a source is made of."""

    def __init__(self, folder: Path, held: ExitStack, request: Any = None) -> None:
        self.root = folder / "docs"
        self.root.mkdir()
        self.spec: dict[str, Any] = {"type": "folder", "path": str(self.root)}
        self.reach = Reach([str(folder)], scratch=folder / "scratch")

    def publish(self, files: dict[str, str]) -> None:
        """Offer these files and no others."""
        for item in self.root.iterdir():
            if item.name != ".git":
                shutil.rmtree(item) if item.is_dir() else item.unlink()
        for path, text in files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)

    def break_down(self) -> None:
        """Answer nothing any more."""
        self.root.rename(self.root.with_name("away"))


class GitOrigin(FolderOrigin):
    def __init__(self, folder: Path, held: ExitStack, request: Any = None) -> None:
        super().__init__(folder, held, request)
        self.spec = {"type": "git", "path": str(self.root), "ref": "main"}
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(self.root), *who, *words], check=True, capture_output=True)

    def publish(self, files: dict[str, str]) -> None:
        super().publish(files)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "next")


class RemoteGitOrigin(GitOrigin):
    """The same repository behind git's own HTTP server."""

    def __init__(self, folder: Path, held: ExitStack, request: Any = None) -> None:
        super().__init__(folder, held, request)
        self.server = held.enter_context(web())
        self.server.rest = backend(folder)
        self.spec = {"type": "git", "url": f"{self.server.url}/docs/.git", "ref": "main"}
        self.reach = Reach(hosts=AllowedHosts.parse(f"127.0.0.1:{self.server.port}"), scratch=folder / "scratch")

    def break_down(self) -> None:
        self.server.rest = lambda asked: Reply(status=503)


class HttpOrigin(FolderOrigin):
    """A list of pages on a web server."""

    def __init__(self, folder: Path, held: ExitStack, request: Any) -> None:
        super().__init__(folder, held, request)
        self.server = held.enter_context(web())
        self.spec = {"type": "http", "url": f"{self.server.url}/list.json"}
        self.reach = Reach(hosts=AllowedHosts.parse(f"127.0.0.1:{self.server.port}"), scratch=folder / "scratch")

    def publish(self, files: dict[str, str]) -> None:
        listed = [{"url": f"/pages/{number}-{path}", "path": path} for number, path in enumerate(files)]
        self.server.pages = {item["url"]: Reply(files[item["path"]].encode()) for item in listed}
        self.server.pages["/list.json"] = Reply(json.dumps(listed).encode())

    def break_down(self) -> None:
        self.server.pages = {"/list.json": Reply(b"down for maintenance", 404)}


class S3Origin(FolderOrigin):
    """A prefix in a real bucket."""

    def __init__(self, folder: Path, held: ExitStack, request: Any) -> None:
        super().__init__(folder, held, request)
        self.server: S3Server = request.getfixturevalue("s3_server")
        self.bucket = f"docs-{secrets.token_hex(6)}"
        self.s3 = held.enter_context(closing(s3_client(self.server)))
        self.s3.create_bucket(Bucket=self.bucket)
        self.s3.put_object(Bucket=self.bucket, Key="elsewhere/secret.txt", Body=b"not below the prefix")
        (folder / "credentials").mkdir()
        self.name_credential(self.server.secret_key)
        self.spec = {
            "type": "s3", "url": f"s3://{self.bucket}/policies", "endpoint": self.server.endpoint, "credential": "s3",
        }  # fmt: skip
        hosts = AllowedHosts.parse(self.server.endpoint.removeprefix("http://"))
        self.reach = Reach(hosts=hosts, credentials=folder / "credentials", scratch=folder / "scratch")

    def name_credential(self, password: str) -> None:
        found = {"tenant": "t1", "url": f"{self.server.endpoint}/{self.bucket}", "username": self.server.access_key}
        (self.root.parent / "credentials" / "s3").write_text(json.dumps({**found, "password": password}))

    def publish(self, files: dict[str, str]) -> None:
        for row in self.s3.list_objects_v2(Bucket=self.bucket, Prefix="policies/").get("Contents", ()):
            self.s3.delete_object(Bucket=self.bucket, Key=row["Key"])
        for path, text in files.items():
            self.s3.put_object(Bucket=self.bucket, Key=f"policies/{path}", Body=text.encode())

    def break_down(self) -> None:
        self.name_credential("another secret")


ORIGINS: dict[str, type[FolderOrigin]] = {
    "folder": FolderOrigin,
    "git": GitOrigin,
    "git by URL": RemoteGitOrigin,
    "http": HttpOrigin,
    "s3": S3Origin,
}
Origin = FolderOrigin


@pytest.fixture(params=sorted(ORIGINS))
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Origin]:
    with ExitStack() as held:
        yield ORIGINS[request.param](tmp_path, held, request)


def start(work: Work, corpus: Corpus, **request: Any) -> str:
    with work.catalogue.write() as session:
        return queue_sync(session, session.get_one(Corpus, corpus.id), request).id


def run(work: Work, origin: Origin, corpus: Corpus, **request: Any) -> dict[str, Any]:
    """Sync to the end; the job with what it found."""
    job = start(work, corpus, **request)
    work.worker(planner=SourcePlanner(work.catalogue, work.objects, origin.reach, work.pipeline.done_hash)).drain()
    work.compute_kv()
    with work.catalogue.read() as session:
        return {**work.view(job), **session.get_one(Job, job).result.get("sync", {})}


def texts(work: Work, corpus: Corpus) -> list[str]:
    return sorted(work.chunks(corpus))


def test_every_kind_is_tried() -> None:
    assert {name.partition(" ")[0] for name in ORIGINS} == set(KINDS)


def test_a_source_is_mirrored_and_only_what_changed_is_worked_on(work: Work, origin: Origin) -> None:
    corpus = work.corpus(source=origin.spec)
    origin.publish(FILES)
    assert run(work, origin, corpus)["status"] == "completed"
    assert texts(work, corpus) == sorted(["stays", "before", "goes", *paragraphs(3).split("\n\n")])
    parsed = len(work.parser.parsed)
    origin.publish({"same.txt": "stays", "edit.txt": "after", "new.txt": "comes", "new/name.txt": paragraphs(3)})
    done = run(work, origin, corpus)
    assert (done["added"], done["modified"], done["deleted"]) == (["new.txt"], ["edit.txt"], ["gone.txt"])
    assert done["renamed"] == [{"from": "old/name.txt", "to": "new/name.txt"}]
    assert sorted(work.parser.parsed[parsed:]) == ["edit.txt", "new.txt"]
    assert texts(work, corpus) == sorted(["stays", "after", "comes", *paragraphs(3).split("\n\n")])
    again = run(work, origin, corpus)
    assert (again["unchanged_count"], again["progress"]["files_total"]) == (4, 0)


def test_a_dry_run_says_what_would_change_and_changes_nothing(work: Work, origin: Origin) -> None:
    corpus = work.corpus(source=origin.spec)
    origin.publish(FILES)
    run(work, origin, corpus)
    origin.publish({"same.txt": "stays", "edit.txt": "after", "new.txt": "comes", "new/name.txt": paragraphs(3)})
    rows, objects = work.count(JobFile), sorted(work.objects.list("raw/"))
    dry = run(work, origin, corpus, dry_run=True)
    assert (dry["status"], dry["dry_run"], dry["progress"]["files_total"]) == ("completed", True, 0)
    assert (dry["added"], dry["modified"], dry["deleted"]) == (["new.txt"], ["edit.txt"], ["gone.txt"])
    assert (work.count(JobFile), sorted(work.objects.list("raw/"))) == (rows, objects)
    assert texts(work, corpus) == sorted(["stays", "before", "goes", *paragraphs(3).split("\n\n")])
    real = run(work, origin, corpus)
    assert {k: real[k] for k in ("added", "modified", "renamed", "deleted")} == {
        k: dry[k] for k in ("added", "modified", "renamed", "deleted")
    }


def test_a_schedule_syncs_it(work: Work, origin: Origin) -> None:
    corpus = work.corpus(source=origin.spec)
    origin.publish(FILES)
    with work.catalogue.write() as session:
        create_schedule(session, session.get_one(Corpus, corpus.id), "* * * * *", "Asia/Kolkata").next_due_at = time.time()
    assert tick(work.catalogue, time.time(), work.rung.append) == 1
    assert tick(work.catalogue, time.time() + 120, work.rung.append) == 0
    work.worker(planner=SourcePlanner(work.catalogue, work.objects, origin.reach, work.pipeline.done_hash)).drain()
    assert len(texts(work, corpus)) == 6


def test_a_source_that_is_away_fails_the_job_and_deletes_nothing(work: Work, origin: Origin) -> None:
    corpus = work.corpus(source=origin.spec)
    origin.publish(FILES)
    run(work, origin, corpus)
    origin.break_down()
    done = run(work, origin, corpus)
    assert done["status"] == "failed"
    assert len(done["errors"]) == 1
    assert done["errors"][0]["message"]
    assert work.count(Document) == 4
    assert len(texts(work, corpus)) == 6


def test_a_source_that_lists_nothing_deletes_nothing(work: Work, origin: Origin) -> None:
    """An unmounted disk looks like this."""
    corpus = work.corpus(source=origin.spec)
    origin.publish(FILES)
    run(work, origin, corpus)
    origin.publish({})
    for dry_run in (True, False):
        done = run(work, origin, corpus, dry_run=dry_run)
        assert done["status"] == "failed"
        assert "no file at all" in done["errors"][0]["message"]
    assert work.count(Document) == 4


def test_a_folder_that_cannot_be_listed_keeps_its_documents(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as held:
        origin = FolderOrigin(tmp_path, held)
    corpus = work.corpus(source=origin.spec)
    origin.publish({**FILES, "old-er.txt": "another"})
    run(work, origin, corpus)
    origin.publish({k: v for k, v in FILES.items() if k != "gone.txt"})
    listed = os.scandir

    def refuse(folder: Any) -> Any:
        if str(folder).endswith("/old"):
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    done = run(work, origin, corpus)
    assert (done["status"], done["deleted"]) == ("completed", ["gone.txt", "old-er.txt"])
    assert {"path": "old", "reason": "cannot be listed: Permission denied"} in done["skipped"]
    assert work.document(corpus, "old/name.txt") is not None


def test_a_file_that_cannot_be_read_keeps_its_document(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as held:
        origin = FolderOrigin(tmp_path, held)
    corpus = work.corpus(source=origin.spec)
    origin.publish(FILES)
    run(work, origin, corpus)
    opened = os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if path == "gone.txt":
            raise OSError(5, "Input/output error")
        return opened(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    done = run(work, origin, corpus)
    assert (done["deleted"], done["unchanged_count"]) == ([], 3)
    assert {"path": "gone.txt", "reason": "cannot be read: Input/output error"} in done["skipped"]


def test_a_missing_git_object_keeps_its_document(work: Work, tmp_path: Path) -> None:
    with ExitStack() as held:
        origin = GitOrigin(tmp_path, held)
    corpus = work.corpus(source=origin.spec)
    origin.publish(FILES)
    run(work, origin, corpus)
    blob = subprocess.run(
        ["git", "-C", str(origin.root), "rev-parse", "main:gone.txt"], capture_output=True, check=True, text=True
    ).stdout.strip()
    (origin.root / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    done = run(work, origin, corpus)
    assert (done["deleted"], done["unchanged_count"]) == ([], 3)
    assert work.document(corpus, "gone.txt") is not None
