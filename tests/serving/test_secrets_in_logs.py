"""Everything is driven with marked secrets and marked texts, and then every log is searched for them."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import structlog
from api_kit import SECRET, Site
from test_api_routes import PROBES, call, order, owned_things, routes

from serving.logs import configure

MARK = "MARKED-7c1f"


@pytest.fixture
def log() -> Any:
    """What a process writes to its log."""
    stream, root = io.StringIO(), logging.getLogger()
    before = root.handlers[:], root.level
    structlog.reset_defaults()
    configure(stream)
    yield stream
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()


def marked(value: Any) -> Any:
    """The same request with a mark in each of its free texts."""
    free = ("query", "input", "content", "filename")
    if isinstance(value, dict):
        return {k: f"{v} {MARK}" if k in free and isinstance(v, str) else marked(v) for k, v in value.items()}
    return [marked(item) for item in value] if isinstance(value, list) else value


def test_no_log_holds_a_key_a_secret_a_name_or_a_text(log: io.StringIO, site: Site, monkeypatch) -> None:
    site.corpus_of("docs", {f"{MARK}-name.txt": f"A text with {MARK} in it.", "bad.txt": f"ERROR invalid_file {MARK}"})
    things = owned_things(site)
    keys = [site.admin_key, site.key("read"), "pr_" + MARK]
    for route, probe in PROBES.items():
        monkeypatch.setitem(PROBES, route, type(probe)(**{**vars(probe), "body": marked(probe.body)}))
    for key in (*keys[1:], site.admin_key):
        for route in sorted(routes(site), key=order):
            call(site, key, route, things)
    hostile(site)
    written = log.getvalue()
    assert "/v1/chat/completions" in written, "there is a log"
    assert '"failure"' in written, "and accidents are in it"
    for secret in (MARK, *keys, *(key[3:] for key in keys), SECRET.decode()):
        assert secret not in written, around(written, secret)


def hostile(site: Site) -> None:
    """Requests that end in an accident, and ones whose mistake holds a text."""
    ask = {"model": "echo-1", "messages": [{"role": "user", "content": MARK}]}
    with site.http() as http:
        site.engine.fail_at = 0
        assert http.post("/v1/chat/completions", json=ask).status_code == 500
        site.engine.fail_at, site.engine.refuse = None, RuntimeError(f"an accident with {MARK}")
        assert http.post("/v1/chat/completions", json=ask).status_code == 500
        site.engine.refuse = None
        for body in ({**ask, "temperature": MARK}, {"messages": MARK}):
            assert http.post("/v1/chat/completions", json=body).status_code == 400
        http.post("/v1/vector_stores", content=f'{{"name": "{MARK}'.encode(), headers={"content-type": "application/json"})
        http.get(f"/v1/files/{MARK}?after={MARK}")
        http.get(f"/{MARK}")
        http.get("/v1/models", headers={"cookie": f"preread_session={MARK}", "x-request-id": "req-1"})
        http.post("/v1/files", files={"file": (f"{MARK}.txt", MARK.encode())})


def around(written: str, secret: str) -> str:
    """The line that gives it away."""
    return next(line for line in written.splitlines() if secret in line)


def test_the_search_would_find_what_it_looks_for(log: io.StringIO, tmp_path: Path) -> None:
    structlog.get_logger("x").info("said", text=MARK)
    logging.getLogger("httpx").warning("a library said %s", MARK)
    assert log.getvalue().count(MARK) == 2
