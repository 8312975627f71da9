"""Every change and every refusal of a known key is in the audit log, without text or secrets."""

from __future__ import annotations

import json

from api_kit import SECRET, Site
from test_api_routes import PROBES, call, order, owned_things, routes

from storage.catalogue.audit import audit_key, verify
from storage.catalogue.schema import AuditEvent

TEXT = "Invoices are due after thirty days."


def events(site: Site, **query: object) -> list[dict]:
    with site.http() as http:
        answer = http.get("/v1/audit", params={"limit": 100, "order": "asc", **query})
        answer.raise_for_status()
        return list(answer.json()["data"])


def test_every_route_that_changes_something_leaves_an_event_with_its_request_id(site: Site) -> None:
    things = owned_things(site)
    for route in sorted(routes(site), key=order):
        if route == ("POST", "/v1/corpora/{corpus_id}/sync"):
            continue  # the probe's is a dry run
        before = newest(site)
        reply = call(site, site.admin_key, route, things)
        after = [event for event in events(site, after=f"audit-{before}") if event["outcome"] == "ok"]
        changes = route[0] != "GET" and PROBES[route].scope != "read"
        if reply.status_code == 200:
            assert bool(after) is changes, route
            assert all(event["request_id"] == reply.headers["x-request-id"] for event in after)
            assert all(event["key_id"] for event in after)
    with site.parts.catalogue.read() as session:
        found = verify(session, "default", audit_key(SECRET))
    assert found.broken is None
    assert found.events > 30


def newest(site: Site) -> int:
    with site.parts.catalogue.read() as session:
        return max([row.id for row in session.query(AuditEvent)], default=0)


def test_a_change_that_is_refused_for_its_scope_is_written_down(site: Site) -> None:
    corpus = site.corpus_of("c", {"a.txt": TEXT})
    with site.http(site.key("read")) as http:
        refused = http.delete(f"/v1/vector_stores/{corpus}")
        assert refused.status_code == 403
    [event] = events(site, outcome="denied")
    assert event["action"] == "DELETE /v1/vector_stores/{vector_store_id}"
    assert event["target"] == corpus
    assert event["request_id"] == refused.headers["x-request-id"]


def test_events_are_found_by_key_time_action_and_target(site: Site) -> None:
    corpus = site.corpus_of("c", {"a.txt": TEXT})
    with site.http() as http:
        http.delete(f"/v1/vector_stores/{corpus}").raise_for_status()
    [gone] = events(site, action="vector_store.delete")
    assert gone["target"] == corpus
    assert events(site, target=corpus, since=gone["at"]) == [gone]
    assert gone not in events(site, until=gone["at"])
    assert events(site, key_id="key-unknown") == []
    assert gone in events(site, key_id=gone["key_id"])


def test_the_export_is_the_log_as_lines_and_holds_no_text_and_no_key(site: Site) -> None:
    site.corpus_of("c", {"marked-name.txt": TEXT})
    key = site.key("read")
    with site.http() as http:
        answer = http.get("/v1/audit/export")
    assert answer.headers["content-type"].startswith("application/jsonl")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines == events(site)
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    for secret in (TEXT, "marked-name", key, site.admin_key):
        assert secret not in answer.text


def test_a_restricted_admin_sees_no_log(site: Site) -> None:
    corpus = site.corpus_of("c", {"a.txt": TEXT})
    with site.http(site.key("admin", corpora=[corpus])) as http:
        assert [http.get(f"/v1/audit{tail}").status_code for tail in ("", "/export")] == [403, 403]
