"""`preread source`, `preread sync --dry-run` and `preread webhook`, against a running API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from api_kit import LISTED, Site
from typer.testing import CliRunner

from ingest.planner import SourcePlanner
from serving import cli_sources, cli_webhooks, cli_work
from serving.cli_client import Api, connect
from storage.errors import UserError

Preread = Callable[..., str]


@pytest.fixture
def preread(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Preread]:
    """Runs a command; what it prints on standard output."""
    key_file = tmp_path / "key"
    key_file.write_text(site.admin_key)
    opened: list[Api] = []

    def connecting(url: str | None, key_file: Path | None) -> Api:
        opened.append(connect(url, key_file))
        return opened[-1]

    app = typer.Typer()
    app.add_typer(cli_sources.app, name="source")
    app.add_typer(cli_webhooks.app, name="webhook")
    cli_work.register(app)
    for module in (cli_sources, cli_webhooks, cli_work):
        monkeypatch.setattr(module, "connect", connecting)

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--url", site.url, "--key-file", str(key_file)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return "\n".join(line for line in done.stdout.splitlines() if "[info" not in line)  # the server logs here too

    yield run
    for api in opened:
        api.close()


@contextmanager
def planning(site: Site) -> Iterator[None]:
    """A worker that lists sources, for as long as the block runs."""
    stop, work = threading.Event(), site.work
    planner = SourcePlanner(work.catalogue, work.objects, site.parts.reach, work.pipeline.done_hash)

    def run() -> None:
        while not stop.wait(0.05):
            work.worker(planner=planner).drain()
            work.compute_kv()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def folder(site: Site) -> Path:
    made = site.parts.settings.data_dir / "sources" / "docs"
    made.mkdir(parents=True)
    (made / "a.txt").write_text("text")
    return made


def test_a_source_is_added_tried_synced_and_removed(site: Site, preread: Preread, folder: Path) -> None:
    (folder / "link.txt").symlink_to("/etc/passwd")
    assert "dry-run" in preread("source", "add", "handbook", str(folder))
    assert "folder" in preread("source", "list")
    with planning(site):
        tried = preread("sync", "handbook", "--dry-run")
        assert "added 1\n  a.txt" in tried
        assert "link.txt: symlink" in tried
        assert site.work.chunks() == []
        assert "completed" in preread("sync", "handbook")
        assert site.work.chunks() == ["text"]
        (folder / "a.txt").rename(folder / "b.txt")
        found = json.loads(preread("sync", "handbook", "--dry-run", "--json"))["found"]
    assert (found["dry_run"], found["renamed"], found["added"]) == (True, [{"from": "a.txt", "to": "b.txt"}], [])
    preread("source", "remove", "handbook")
    assert preread("source", "list").strip() == "no sources"
    assert site.work.chunks() == ["text"]


@pytest.mark.parametrize(
    ("words", "source"),
    [
        ([f"http://{LISTED}/a.git", "--ref", "v1"], {"type": "git", "url": f"http://{LISTED}/a.git", "ref": "v1"}),
        ([f"http://{LISTED}/list", "--list"], {"type": "http", "url": f"http://{LISTED}/list"}),
        (
            ["s3://bucket/docs", "--endpoint", f"http://{LISTED}"],
            {"type": "s3", "url": "s3://bucket/docs", "endpoint": f"http://{LISTED}", "region": "us-east-1"},
        ),
    ],
)
def test_what_a_source_is_follows_from_its_address(preread: Preread, words: list[str], source: dict[str, str]) -> None:
    assert json.loads(preread("source", "add", "docs", *words, "--json"))["source"] == source
    assert words[0] in preread("source", "list")


def test_what_may_not_be_read_is_refused_at_once(preread: Preread) -> None:
    for words in (["/etc"], ["https://github.com/a/b"], ["s3://bucket"], ["https://x.example/list", "--list"]):
        with pytest.raises(UserError, match="may"):
            preread("source", "add", "docs", *words)
    with pytest.raises(UserError, match="credential"):
        preread("source", "add", "docs", f"http://{LISTED}/a.git", "--credential", "none")
    with pytest.raises(UserError, match="together"):
        preread("source", "add", "docs", "x", "--git", "--list")
    assert preread("source", "list").strip() == "no sources"


def test_a_hook_is_made_and_removed(site: Site, preread: Preread, folder: Path) -> None:
    preread("source", "add", "handbook", str(folder))
    address, secret = preread("source", "hook", "handbook").splitlines()
    assert address.startswith(f"{site.url}/hooks/hook-")
    with site.http("") as http:
        sent = {"x-gitlab-token": secret.removeprefix("secret: "), "x-gitlab-event": "Push Hook"}
        assert http.post(address, json={"ref": "refs/heads/main"}, headers=sent).json()["outcome"] == "started"
        preread("source", "hook", "handbook", "--remove")
        assert http.post(address, json={"ref": "refs/heads/other"}, headers=sent).status_code == 401


def test_a_webhook_is_added_listed_shown_and_removed(preread: Preread) -> None:
    id, secret = preread("webhook", "add", f"http://{LISTED}/told", "--event", "job.failed").split()
    assert secret.startswith("whsec_")
    listed = preread("webhook", "list")
    assert "job.failed" in listed
    assert secret not in listed
    assert preread("webhook", "show", id).strip() == "nothing was told yet"
    assert preread("webhook", "remove", id).strip() == f"removed {id}"
    assert preread("webhook", "list").strip() == "no webhooks"
    with pytest.raises(UserError, match="may not connect"):
        preread("webhook", "add", "https://example.org/")
