"""A git host's word starts a sync: once, only with its secret, and never two at a time."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_kit import Site
from fixtures_work import settle_all
from sqlalchemy import select, update

from ingest import pushes
from ingest.planner import SourcePlanner
from ingest.schedules import create_schedule, tick
from storage.catalogue.schema import Corpus, Job, PushDelivery, Schedule, ScheduleRun

KINDS = ("github", "gitea", "forgejo", "gitlab")


@dataclass
class GitHostStandIn:
    """What a git host sends."""

    site: Site
    corpus: str
    hook: dict[str, Any] = field(default_factory=dict)

    def make_hook(self) -> None:
        with self.site.http() as http:
            reply = http.post(f"/v1/corpora/{self.corpus}/hook")
            assert reply.status_code == 200, reply.text
            self.hook = reply.json()

    def send(
        self, kind: str = "github", ref: str = "refs/heads/main", event: str = "push", secret: str | None = None, **more: Any
    ) -> httpx.Response:
        about = {"default_branch": "main"}
        body = {"ref": ref, "project" if kind == "gitlab" else "repository": about, "after": more.pop("after", "1")}
        data = json.dumps(body).encode() if "data" not in more else more.pop("data")
        return self.post(self.headers(kind, event, data, self.hook["secret"] if secret is None else secret, **more), data)

    def headers(self, kind: str, event: str, data: bytes, secret: str, delivery: str = "d-1") -> dict[str, str]:
        mac = hmac.new(secret.encode(), data, hashlib.sha256).hexdigest()
        if kind == "gitlab":
            name = {"push": "Push Hook", "tag": "Tag Push Hook"}.get(event, event)
            return {"X-Gitlab-Token": secret, "X-Gitlab-Event": name, "X-Gitlab-Event-UUID": delivery}
        if kind == "github":
            return {"X-Hub-Signature-256": f"sha256={mac}", "X-GitHub-Event": event, "X-GitHub-Delivery": delivery}
        name = kind.capitalize()
        return {f"X-{name}-Signature": mac, f"X-{name}-Event": event, f"X-{name}-Delivery": delivery}

    def post(self, headers: Mapping[str, str | bytes], data: bytes) -> httpx.Response:
        sent = {b"content-type": b"application/json"}
        sent |= {name.encode(): value if isinstance(value, bytes) else value.encode() for name, value in headers.items()}
        with self.site.http("") as http:
            return http.post(self.hook["path"], content=data, headers=sent)

    def outcome(self, **options: Any) -> str:
        reply = self.send(**options)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["outcome"])

    def jobs(self) -> list[Job]:
        with self.site.parts.catalogue.read() as session:
            return list(session.scalars(select(Job).where(Job.type == "sync").order_by(Job.created_at)))


@pytest.fixture
def host(site: Site, tmp_path: Path) -> GitHostStandIn:
    folder = tmp_path / "sources" / "docs"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("text")
    made = GitHostStandIn(site, site.corpus_of("docs", {}))
    set_source(made, {"type": "folder", "path": str(folder)})
    made.make_hook()
    return made


def set_source(host: GitHostStandIn, source: dict[str, Any]) -> None:
    with host.site.parts.catalogue.write() as session:
        session.execute(update(Corpus).where(Corpus.id == host.corpus).values(source=source))


@pytest.mark.parametrize("kind", KINDS)
def test_a_push_starts_a_sync(site: Site, host: GitHostStandIn, kind: str) -> None:
    site.rung.clear()
    assert host.outcome(kind=kind) == "started"
    assert site.rung == ["ingest"]
    (job,) = host.jobs()
    work = site.work
    work.worker(planner=SourcePlanner(work.catalogue, work.objects, site.parts.reach, work.pipeline.done_hash)).drain()
    work.compute_kv()
    assert work.view(job.id)["status"] == "completed"
    assert work.chunks() == ["text"]
    with site.http() as http:
        (delivery,) = http.get(f"/v1/corpora/{host.corpus}/hook").json()["deliveries"]
    assert (delivery["outcome"], delivery["job_id"], delivery["delivery_id"]) == ("started", job.id, "d-1")


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_secret_nothing_happens(host: GitHostStandIn, kind: str) -> None:
    good = json.dumps({"ref": "refs/heads/main"}).encode()
    headers = host.headers(kind, "push", good, host.hook["secret"])
    proof = next(name for name in headers if "Signature" in name or "Token" in name)
    wrong = [{**headers, proof: value} for value in ("", "sha256=", "ü", headers[proof][:-1], headers[proof].swapcase() + "x")]
    for each in (*wrong, {k: v for k, v in headers.items() if k != proof}, {}):
        assert host.post({name: value.encode() for name, value in each.items()}, good).status_code == 401, each
    assert host.send(kind=kind, secret="guessed").status_code == 401
    if kind != "gitlab":  # which does not sign what it sends
        assert host.post(headers, good.replace(b"main", b"evil")).status_code == 401
    assert host.jobs() == []


def test_an_unknown_hook_looks_like_a_wrong_secret_and_no_secret_opens_another(site: Site, host: GitHostStandIn) -> None:
    refused = host.send(secret="wrong")
    other = GitHostStandIn(site, site.corpus_of("other", {}))
    set_source(other, {"type": "folder", "path": str(site.parts.settings.data_dir)})
    other.make_hook()
    assert host.send(secret=other.hook["secret"]).status_code == 401
    unknown = GitHostStandIn(site, host.corpus, {**host.hook, "path": "/hooks/hook-unknown"}).send()
    assert (unknown.status_code, unknown.json()) == (refused.status_code, refused.json())


def test_the_secret_is_shown_once_and_a_new_hook_has_another(site: Site, host: GitHostStandIn) -> None:
    with site.http() as http:
        assert "secret" not in http.get(f"/v1/corpora/{host.corpus}/hook").json()
    old = host.hook
    host.make_hook()
    assert host.hook["secret"] != old["secret"]
    assert GitHostStandIn(site, host.corpus, old).send().status_code == 401
    with site.http() as http:
        assert http.delete(f"/v1/corpora/{host.corpus}/hook").json()["deleted"]
    assert host.send().status_code == 401


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_delivery_starts_nothing_even_under_another_id(site: Site, host: GitHostStandIn, kind: str) -> None:
    first = host.send(kind=kind).json()
    end_jobs(site)
    again = host.send(kind=kind).json()
    assert again == first
    if kind != "gitlab":
        assert host.send(kind=kind, delivery="d-2").json() == first
    assert len(host.jobs()) == 1


def end_jobs(site: Site) -> None:
    with site.parts.catalogue.write() as session:
        session.execute(update(Job).values(status="completed"))


def test_a_ping_and_other_events_are_answered_and_start_nothing(host: GitHostStandIn) -> None:
    assert host.outcome(event="ping") == "ping"
    assert host.outcome(event="issues", after="2") == "ignored"
    assert host.jobs() == []


def test_what_is_no_json_is_refused_with_what_to_do(host: GitHostStandIn) -> None:
    for data in (b"payload=%7B%7D", b"", b"\xff", b"[" * 100_000):
        reply = host.send(data=data)
        assert reply.status_code == 400
        assert "application/json" in reply.json()["error"]["message"]
    assert host.outcome(data=b"[]") in ("started", "ignored")


@pytest.mark.parametrize(
    ("wanted", "ref", "kind", "outcome"),
    [
        ("main", "refs/heads/main", "github", "started"),
        ("main", "refs/heads/other", "github", "ignored"),
        ("main", "refs/heads/main2", "github", "ignored"),
        ("refs/heads/main", "refs/heads/main", "gitlab", "started"),
        ("v1", "refs/tags/v1", "github", "started"),
        ("HEAD", "refs/heads/main", "gitea", "started"),
        ("HEAD", "refs/heads/other", "gitea", "ignored"),
        ("HEAD", "refs/heads/other", "gitlab", "ignored"),
        ("HEAD", "refs/heads/main", "gitlab", "started"),
        ("0123456789abcdef0123456789abcdef01234567", "refs/heads/main", "github", "ignored"),
    ],
)
def test_only_a_push_to_the_sources_own_branch_counts(
    host: GitHostStandIn, wanted: str, ref: str, kind: str, outcome: str
) -> None:
    set_source(host, {"type": "git", "path": "/somewhere", "ref": wanted})
    assert host.outcome(ref=ref, kind=kind) == outcome
    assert len(host.jobs()) == (outcome == "started")


def begin(site: Site) -> None:
    """A worker has begun to list the source."""
    with site.parts.catalogue.write() as session:
        session.execute(update(Job).where(Job.type == "sync").values(status="in_progress", attempt=1, lease_owner="w"))


def test_a_push_before_a_waiting_sync_has_begun_adds_nothing(site: Site, host: GitHostStandIn) -> None:
    host.outcome()
    assert host.outcome(after="2") == "skipped_overlap"
    end_jobs(site)
    assert pushes.follow(site.parts.catalogue, site.rung.append, 0.0) == 0
    assert len(host.jobs()) == 1


def test_pushes_during_a_sync_lead_to_one_more_when_it_has_ended(site: Site, host: GitHostStandIn) -> None:
    host.outcome()
    begin(site)
    assert [host.outcome(after=str(n)) for n in (2, 3)] == ["follows", "follows"]
    assert pushes.follow(site.parts.catalogue, site.rung.append, 0.0) == 0
    assert len(host.jobs()) == 1, "not while it runs"
    end_jobs(site)
    site.rung.clear()
    assert pushes.follow(site.parts.catalogue, site.rung.append, 0.0) == 1
    assert pushes.follow(site.parts.catalogue, site.rung.append, 0.0) == 0
    assert len(host.jobs()) == 2
    assert site.rung == ["ingest"]


def test_a_dry_run_is_no_sync_that_a_push_could_wait_for(site: Site, host: GitHostStandIn) -> None:
    with site.http() as http:
        http.post(f"/v1/corpora/{host.corpus}/sync", json={"dry_run": True}).raise_for_status()
    assert host.outcome() == "started"


def test_a_schedule_skips_while_a_pushed_sync_runs(site: Site, host: GitHostStandIn) -> None:
    now = site.parts.clock()
    with site.parts.catalogue.write() as session:
        create_schedule(session, session.get_one(Corpus, host.corpus), "* * * * *").next_due_at = now - 1
    host.outcome()
    assert tick(site.parts.catalogue, now, site.rung.append) == 0
    with site.parts.catalogue.read() as session:
        assert session.scalars(select(ScheduleRun.outcome)).all() == ["skipped_overlap"]
        assert session.scalars(select(Schedule.next_due_at)).one() > now


def test_deliveries_in_a_minute_are_bounded(site: Site, host: GitHostStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "MOST_A_MINUTE", 3)
    for n in range(3):
        host.outcome(after=str(n))
    assert host.send(after="over").status_code == 429
    assert host.send(after="0").status_code == 200, "a repeated one costs nothing"
    with site.parts.catalogue.write() as session:
        session.execute(update(PushDelivery).values(at=PushDelivery.at - 61))
    assert host.send(after="over").status_code == 200


def test_old_deliveries_are_forgotten(site: Site, host: GitHostStandIn) -> None:
    host.outcome()
    now = site.parts.clock()
    pushes.follow(site.parts.catalogue, site.rung.append, now)
    assert site.work.count(PushDelivery) == 1
    pushes.follow(site.parts.catalogue, site.rung.append, now + pushes.KEPT_SECONDS + 60)
    assert site.work.count(PushDelivery) == 0


def test_pushes_at_the_same_moment_start_one_sync(host: GitHostStandIn) -> None:
    barrier, outcomes = threading.Barrier(6), []  # type: tuple[threading.Barrier, list[str]]

    def push(number: int) -> None:
        barrier.wait()
        outcomes.append(host.outcome(after=str(number)))

    threads = [threading.Thread(target=push, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["skipped_overlap"] * 5 + ["started"]
    assert len(host.jobs()) == 1


def test_a_deleted_corpus_takes_its_hook_along(site: Site, host: GitHostStandIn) -> None:
    host.outcome()
    with site.http() as http:
        http.delete(f"/v1/vector_stores/{host.corpus}").raise_for_status()
    with site.parts.catalogue.write() as session:
        settle_all(session)
    assert host.send(after="2").status_code == 401
    assert site.work.count(PushDelivery) == 0


def test_a_corpus_without_a_source_gets_no_hook(site: Site) -> None:
    corpus = site.corpus_of("plain", {})
    with site.http() as http:
        reply = http.post(f"/v1/corpora/{corpus}/hook")
    assert reply.status_code == 400
    assert "source" in reply.json()["error"]["message"]
