"""`preread audit|tenant|key` against a running service, and on the machine of its database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_kit import SECRET, Site
from sqlalchemy import delete, text, update
from typer.testing import CliRunner

from serving import cli_access, cli_keys
from serving.cli import app
from serving.cli_client import Api, connect
from storage.catalogue.schema import AuditEvent
from storage.errors import PrereadError


@pytest.fixture
def preread(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command as the operator; its output, and its exit code where that is not 0."""
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PREREAD_SECRET", SECRET.decode())
    opened: list[Api] = []

    def connecting(url: str | None, key_file: Path | None) -> Api:
        opened.append(connect(url, key_file))
        return opened[-1]

    for room in (cli_access, cli_keys):  # a command's process ends, and its connections with it
        monkeypatch.setattr(room, "connect", connecting)
    key_file = tmp_path / "admin.key"
    key_file.write_text(site.admin_key)

    def run(*arguments: str, at_server: bool = True, code: int = 0) -> str:
        where = ("--url", site.url, "--key-file", str(key_file)) if at_server else ()
        done = CliRunner().invoke(app, [*arguments, *where])
        if isinstance(done.exception, PrereadError):
            raise done.exception
        assert done.exit_code == code, (done.output, done.exception)
        return "".join(line for line in done.stdout.splitlines(True) if "[info" not in line)  # the server logs here too

    yield run
    for api in opened:
        api.close()


def test_a_tenant_is_made_limited_and_disabled(site: Site, preread) -> None:
    name, key = preread("tenant", "create", "acme", "--quota-bytes", "1000").split()
    assert name == "acme"
    with site.http(key) as http:
        assert http.get("/v1/models").status_code == 200
        assert preread("tenant", "change", "acme", "--quota-bytes", "-1", "--disable").split()[2:] == [
            "disabled", "none", "none",
        ]  # fmt: skip
        assert http.get("/v1/models").status_code == 401
        preread("tenant", "change", "acme", "--enable")
        assert http.get("/v1/models").status_code == 200
    assert "acme" in preread("tenant", "list")
    assert preread("tenant", "share", "books", "acme", "default") == "books: acme, default\n"


def test_an_installation_without_an_operator_gets_one_on_its_own_machine(site: Site, preread) -> None:
    _, key = preread("tenant", "operator-key", at_server=False).split()
    with site.http(key) as http:
        assert http.get("/v1/tenants").status_code == 200
        assert http.get("/v1/models").status_code == 403


def test_a_key_is_made_with_an_end_a_name_and_limits(site: Site, preread) -> None:
    limits = ("--days", "2", "--principal", "group:hr", "--requests-per-minute", "5", "--tokens-per-minute", "9")
    made = json.loads(preread("key", "create", "k", *limits, "--json"))
    assert 1.9 < (made["expires_at"] - made["created_at"]) / 86400 < 2.1
    assert (made["principals"], made["requests_per_minute"], made["tokens_per_minute"]) == (["group:hr"], 5, 9)


def test_an_export_is_checked_against_the_log_later(site: Site, preread, tmp_path: Path) -> None:
    site.key("read")
    export = tmp_path / "export.jsonl"
    export.write_text(preread("audit", "export"))
    assert len(export.read_text().splitlines()) == 2
    site.key("read")
    assert "3 events, whole" in preread("audit", "verify", "--against", str(export), at_server=False)
    with site.parts.catalogue.write() as session:  # the newest are cut off, and the head with them: the chain is whole
        session.execute(text("DROP TRIGGER audit_event_stays"))
        first = session.query(AuditEvent).filter_by(seq=1).one()
        session.execute(delete(AuditEvent).where(AuditEvent.seq > 1))
        session.execute(text("UPDATE audit_head SET seq = 1, mac = :mac"), {"mac": first.mac})
    assert "1 events, whole" in preread("audit", "verify", at_server=False)
    told = preread("audit", "verify", "--against", str(export), at_server=False, code=1)
    assert "audit-2 (api_key.create) is gone or changed" in told


def test_a_broken_chain_is_exit_code_1(site: Site, preread) -> None:
    with site.parts.catalogue.write() as session:
        session.execute(text("DROP TRIGGER audit_event_kept"))
        session.execute(update(AuditEvent).values(target="another"))
    assert "BROKEN: event 1" in preread("audit", "verify", at_server=False, code=1)


def test_old_events_go_at_the_operator_s_word_and_an_older_export_still_fits(site: Site, preread, tmp_path: Path) -> None:
    export = tmp_path / "export.jsonl"
    export.write_text(preread("audit", "export"))
    preread("audit", "prune", "--before", "2999-01-01", at_server=False)
    assert "1 events, whole" in preread("audit", "verify", "--against", str(export), at_server=False)
    assert json.loads(preread("audit", "export"))["action"] == "audit.prune"


def test_a_day_that_is_none_is_refused(site: Site, preread) -> None:
    with pytest.raises(PrereadError, match="2026-01-31"):
        preread("audit", "export", "--since", "yesterday")
