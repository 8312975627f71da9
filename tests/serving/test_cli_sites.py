"""`preread site`, against a running API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_kit import Site
from typer.testing import CliRunner

from serving import cli_sites
from serving.cli_client import Api, connect
from storage.errors import NotFound, UserError
from storage.site_key import SiteKey


@pytest.fixture
def preread(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Runs a command; what it prints on standard output."""
    key_file = tmp_path / "key"
    key_file.write_text(site.admin_key)
    opened: list[Api] = []

    def connecting(url: str | None, key_file: Path | None) -> Api:
        opened.append(connect(url, key_file))
        return opened[-1]

    monkeypatch.setattr(cli_sites, "connect", connecting)  # a command's process ends, and its connections with it

    def run(*words: str) -> str:
        done = CliRunner().invoke(cli_sites.app, [*words, "--url", site.url, "--key-file", str(key_file)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return "\n".join(line for line in done.stdout.splitlines() if "[info" not in line)  # the server logs here too

    yield run
    for api in opened:
        api.close()


def test_a_site_is_added_listed_told_what_to_hold_and_removed(site: Site, preread: Callable[..., str]) -> None:
    corpus = site.corpus_of("handbook", {"a.txt": "Invoices are due after thirty days."})
    printed = preread("add", "coast", "--corpus", "handbook").strip()
    assert printed.startswith("PREREAD_PARENT_KEY=prs_")
    key = SiteKey.parse(printed.removeprefix("PREREAD_PARENT_KEY="))
    assert key.tenant_id == "default"

    listed = preread("list")
    assert "coast" in listed
    assert "never" in listed
    assert key.secret.hex() not in listed
    assert corpus in preread("push", "coast", "--corpus", "handbook")
    [shown] = json.loads(preread("list", "--json"))
    assert (shown["id"], shown["corpora"], shown["pushed"]) == (key.site_id, [corpus], [corpus])

    assert preread("remove", "coast").strip() == "removed coast"
    assert preread("list").strip() == "no sites"


def test_mistakes_are_named(site: Site, preread: Callable[..., str]) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        preread("remove", "nowhere")
    with pytest.raises(NotFound, match="unknown"):
        preread("add", "coast", "--corpus", "unknown")
    preread("add", "coast")
    with pytest.raises(UserError, match="already"):
        preread("add", "coast")


def test_a_site_is_not_told_to_hold_what_it_may_not(site: Site, preread: Callable[..., str]) -> None:
    site.corpus_of("open", {})
    closed = site.corpus_of("closed", {})
    preread("add", "coast", "--corpus", "open")
    with pytest.raises(UserError, match=closed):
        preread("push", "coast", "--corpus", "closed")
