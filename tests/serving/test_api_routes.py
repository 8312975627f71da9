"""Every route of the OpenAPI file, as its owner, as another tenant, and with keys that are absent, revoked, expired, of a
disabled tenant, of a lesser scope, or for another corpus. A new route fails until it is in the table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from api_kit import LISTED, SECRET, Site

from serving.auth import NewKey, Principal, create_key
from storage.catalogue.schema import Tenant

OPEN = {"/healthz", "/readyz", "/metrics"}  # without a key
OPEN |= {f"/auth/{name}" for name in ("config", "login", "callback", "session", "logout")}  # by cookies, see test_login.py
# By a site's key, see test_sites.py, or by a git host, see test_pushes.py.
SIGNED = {"/site/{site_id}/objects/{name}", "/site/{site_id}/{call}", "/hooks/{hook_id}"}
TEXT = "Invoices are due after thirty days."


@dataclass(frozen=True)
class Probe:
    """How a route is called. `own`: its answer to the owner. `other`: to another tenant's admin (404 where
    path or body name the owner's things, 200 where the answer is that tenant's own). `scope`: needed."""

    body: Any = None
    files: Any = None
    own: int = 200
    other: int = 404
    scope: str = "read"
    query: str = ""


def question(**extra: Any) -> dict[str, Any]:
    return {"model": "echo-1", "messages": [{"role": "user", "content": "when?"}], **extra}


W = "write"
END = {"/v1/uploads/{upload_id}/complete": 1, "/v1/uploads/{upload_id}/cancel": 2}
STORE, DOCUMENT = "/v1/vector_stores/{vector_store_id}", "/v1/vector_stores/{vector_store_id}/files/{file_id}"
PROBES: dict[tuple[str, str], Probe] = {
    ("GET", "/v1/models"): Probe(other=200),
    ("GET", "/v1/models/{model}"): Probe(),
    ("POST", "/v1/chat/completions"): Probe(question(vector_store_ids=["{corpus}"])),
    ("POST", "/v1/responses"): Probe({"model": "echo-1@{corpus}", "input": "when?"}),
    ("POST", "/retrieval"): Probe({"knowledge_id": "{corpus}", "query": "invoices"}),
    ("POST", "/v1/uploads"): Probe(
        {"filename": "n.txt", "bytes": 3, "purpose": "assistants", "mime_type": "text/plain"}, other=200, scope=W
    ),
    ("POST", "/v1/uploads/{upload_id}/parts"): Probe(files={"data": ("part", b"new")}, scope=W),
    ("POST", "/v1/uploads/{upload_id}/complete"): Probe({"part_ids": ["{part}"]}, scope=W),
    ("POST", "/v1/uploads/{upload_id}/cancel"): Probe(scope=W),
    ("POST", "/v1/completions"): Probe({"model": "echo-1", "prompt": "when?"}, other=200),
    ("POST", "/v1/embeddings"): Probe({"input": "x", "model": "m"}, other=200),
    ("POST", "/v1/rerank"): Probe({"query": "x", "documents": ["x"]}, other=200),
    ("POST", "/v1/files"): Probe(files={"file": ("new.txt", b"new")}, other=200, scope=W),
    ("GET", "/v1/files"): Probe(other=200),
    ("GET", "/v1/files/{file_id}"): Probe(),
    ("GET", "/v1/files/{file_id}/content"): Probe(),
    ("DELETE", "/v1/files/{file_id}"): Probe(scope=W),
    ("POST", "/v1/vector_stores"): Probe({"name": "new", "file_ids": ["{file}"]}, scope=W),
    ("GET", "/v1/vector_stores"): Probe(other=200),
    ("GET", STORE): Probe(),
    ("POST", STORE): Probe({"name": "renamed"}, scope=W),
    ("DELETE", STORE): Probe(scope=W),
    ("POST", STORE + "/search"): Probe({"query": "invoices"}),
    ("POST", STORE + "/files"): Probe({"file_id": "{file}"}, scope=W),
    ("GET", STORE + "/files"): Probe(),
    ("GET", DOCUMENT): Probe(),
    ("POST", DOCUMENT): Probe({"attributes": {"a": "b"}}, scope=W),
    ("GET", DOCUMENT + "/content"): Probe(),
    ("GET", DOCUMENT + "/passage"): Probe(query="?start=0&end=8"),
    ("DELETE", DOCUMENT): Probe(scope=W),
    ("POST", STORE + "/file_batches"): Probe({"file_ids": ["{file}"]}, scope=W),
    ("GET", STORE + "/file_batches/{batch_id}"): Probe(),
    ("GET", STORE + "/file_batches/{batch_id}/files"): Probe(),
    ("POST", STORE + "/file_batches/{batch_id}/cancel"): Probe(scope=W),
    ("POST", "/v1/corpora/{corpus_id}/documents"): Probe(files={"files": ("n.txt", b"new")}, scope=W),
    ("POST", "/v1/corpora/{corpus_id}/sync"): Probe({"manifest": [], "dry_run": True}, scope=W),
    ("GET", "/v1/corpora/{corpus_id}/syncs/{sync_id}"): Probe(),
    ("POST", "/v1/corpora/{corpus_id}/reindex"): Probe(scope="admin"),
    ("GET", "/v1/corpora/{corpus_id}/sources"): Probe(),
    ("PUT", "/v1/corpora/{corpus_id}/sources"): Probe({"source": None}, scope="admin"),
    ("POST", "/v1/corpora/{corpus_id}/hook"): Probe(scope="admin"),
    ("GET", "/v1/corpora/{corpus_id}/hook"): Probe(scope="admin"),
    ("DELETE", "/v1/corpora/{corpus_id}/hook"): Probe(scope="admin"),
    ("GET", "/v1/corpora/{corpus_id}/settings"): Probe(),
    ("PUT", "/v1/corpora/{corpus_id}/settings"): Probe({"emphasis": {"terms/*": 2.0}}, scope="admin"),
    ("GET", "/v1/jobs"): Probe(other=200),
    ("GET", "/v1/jobs/{job_id}"): Probe(),
    ("GET", "/v1/jobs/{job_id}/events"): Probe(),
    ("POST", "/v1/jobs/{job_id}/cancel"): Probe(scope=W),
    ("POST", "/v1/jobs/{job_id}/retry"): Probe({"only": "all"}, scope=W),
    ("POST", "/v1/schedules"): Probe({"corpus_id": "{corpus}", "cron": "0 3 * * *"}, scope=W),
    ("GET", "/v1/schedules"): Probe(other=200),
    ("GET", "/v1/schedules/{schedule_id}"): Probe(),
    ("POST", "/v1/schedules/{schedule_id}"): Probe({"enabled": False}, scope=W),
    ("DELETE", "/v1/schedules/{schedule_id}"): Probe(scope=W),
    ("POST", "/v1/api_keys"): Probe({"name": "n", "corpora": ["{corpus}"]}, scope="admin"),
    ("GET", "/v1/api_keys"): Probe(other=200, scope="admin"),
    ("DELETE", "/v1/api_keys/{key_id}"): Probe(scope="admin"),
    ("GET", "/v1/audit"): Probe(other=200, scope="admin"),
    ("GET", "/v1/audit/export"): Probe(other=200, scope="admin"),
    ("POST", "/v1/tenants"): Probe({"id": "newcomer"}, other=403, scope="operator"),
    ("GET", "/v1/tenants"): Probe(other=403, scope="operator"),
    ("GET", "/v1/tenants/{tenant_id}"): Probe(other=403, scope="operator"),
    ("POST", "/v1/tenants/{tenant_id}"): Probe({"quota_bytes": 10**9}, other=403, scope="operator"),
    ("GET", "/v1/sharing_groups"): Probe(other=403, scope="operator"),
    ("PUT", "/v1/sharing_groups/{name}"): Probe({"tenants": ["{tenant_id}"]}, other=403, scope="operator"),
    ("GET", "/v1/storage"): Probe(other=200, scope="admin"),
    ("GET", "/v1/usage"): Probe(other=200, scope="admin"),
    ("GET", "/v1/purges/{purge_id}"): Probe(),
    ("POST", "/v1/webhooks"): Probe({"url": f"http://{LISTED}/", "corpora": ["{corpus}"]}, scope="admin"),
    ("GET", "/v1/webhooks"): Probe(other=200, scope="admin"),
    ("GET", "/v1/webhooks/{webhook_id}"): Probe(scope="admin"),
    ("DELETE", "/v1/webhooks/{webhook_id}"): Probe(scope="admin"),
    ("POST", "/v1/sites"): Probe({"name": "coast", "corpora": ["{corpus}"]}, scope="admin"),
    ("GET", "/v1/sites"): Probe(other=200, scope="admin"),
    ("POST", "/v1/sites/{site_id}/push"): Probe({"corpora": ["{corpus}"]}, scope="admin"),
    ("DELETE", "/v1/sites/{site_id}"): Probe(scope="admin"),
}


def other_tenant(site: Site) -> str:
    with site.parts.catalogue.write() as session:
        session.add(Tenant(id="rival", name="rival", created_at=time.time()))
    actor = Principal("rival", None, frozenset({"admin"}))
    return str(create_key(site.parts.catalogue, SECRET, actor, NewKey("rival", ("admin",)))["key"])


def expired_key(site: Site) -> str:
    """A key of the owner's that was good a moment ago."""
    actor = Principal("default", None, frozenset({"admin"}))
    wanted = NewKey("short", ("admin",), expires_at=time.time() - 1)
    return str(create_key(site.parts.catalogue, SECRET, actor, wanted, lambda: time.time() - 60)["key"])


def owned_things(site: Site) -> dict[str, str]:
    """One of everything, owned by the default tenant; path parameter or name -> id."""
    folder = site.parts.settings.data_dir / "sources"
    folder.mkdir()
    corpus = site.corpus_of("handbook", {"terms.txt": TEXT})
    with site.http() as http:
        file = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"][0]["id"]
        job = http.get("/v1/jobs").json()["data"][0]["id"]
        source = {"source": {"type": "folder", "path": str(folder)}}
        http.put(f"/v1/corpora/{corpus}/sources", json=source).raise_for_status()
        sync = http.post(f"/v1/corpora/{corpus}/sync", json={}).json()["job_id"]
        http.post(f"/v1/corpora/{corpus}/hook").raise_for_status()
        schedule = http.post("/v1/schedules", json={"corpus_id": corpus, "cron": "0 3 * * *"}).json()["id"]
        key = http.post("/v1/api_keys", json={"name": "spare"}).json()["id"]
        registered = http.post("/v1/sites", json={"name": "edge", "corpora": [corpus]}).json()["id"]
        webhook = http.post("/v1/webhooks", json={"url": f"http://{LISTED}/", "corpora": [corpus]}).json()["id"]
        spare = http.post("/v1/vector_stores", json={"name": "spare"}).json()["id"]
        purge = http.delete(f"/v1/vector_stores/{spare}").json()["job_id"]
        announced = {"filename": "big.txt", "bytes": 3, "purpose": "assistants", "mime_type": "text/plain"}
        upload = http.post("/v1/uploads", json=announced).json()["id"]
        part = http.post(f"/v1/uploads/{upload}/parts", files={"data": ("part", b"big")}).json()["id"]
    return {
        "vector_store_id": corpus, "corpus_id": corpus, "corpus": corpus, "file_id": file, "file": file,
        "batch_id": job, "job_id": job, "schedule_id": schedule, "key_id": key, "site_id": registered, "purge_id": purge,
        "sync_id": sync, "webhook_id": webhook, "tenant_id": "default", "name": "handbooks", "upload_id": upload, "part": part,
        "model": f"echo-1@{corpus}",
    }  # fmt: skip


def routes(site: Site) -> list[tuple[str, str]]:
    with site.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    return [
        (method.upper(), path) for path, methods in paths.items() for method in methods if path not in OPEN | SIGNED
    ]


def call(site: Site, key: str, route: tuple[str, str], things: dict[str, str]) -> httpx.Response:
    method, path = route
    probe = PROBES[route]

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            for name, id in things.items():
                value = value.replace("{" + name + "}", id)
            return value
        if isinstance(value, list):
            return [fill(item) for item in value]
        return {k: fill(v) for k, v in value.items()} if isinstance(value, dict) else value

    with site.http(key) as http:
        return http.request(method, fill(path) + probe.query, json=fill(probe.body), files=probe.files)


def order(route: tuple[str, str]) -> tuple[bool, bool, int, str]:
    """What takes something away or ends it comes last, the store after what is in it."""
    method, path = route
    return method in ("DELETE", "PUT"), path == STORE, END.get(path, 0), path


def test_every_route_has_a_probe(site: Site) -> None:
    assert set(routes(site)) == set(PROBES)


def test_no_key_and_one_that_is_no_longer_good_get_nowhere(site: Site) -> None:
    things = owned_things(site)
    dead = [other_tenant(site), site.key("admin"), expired_key(site)]
    with site.http() as http:
        newest = http.get("/v1/api_keys").json()["data"][-1]["id"]
        http.delete(f"/v1/api_keys/{newest}").raise_for_status()
        http.post("/v1/tenants/rival", json={"disabled": True}).raise_for_status()
    for route in routes(site):
        for key in ("", *dead, "pr_" + "x" * 43, "ключ".encode().decode("latin-1")):
            reply = call(site, key, route, things)
            assert reply.status_code == 401, (route, key)
            assert reply.json()["error"]["type"] == "authentication_error"


def test_other_tenant_sees_nothing(site: Site) -> None:
    things = owned_things(site)
    rival = other_tenant(site)
    before = snapshot(site, things)
    for route in sorted(routes(site), key=order):
        reply = call(site, rival, route, things)
        assert reply.status_code == PROBES[route].other, (route, reply.text)
        if reply.status_code == 200:
            assert not any(id in reply.text for id in things.values()), route
        assert TEXT not in reply.text
    assert snapshot(site, things) == before
    with site.http(rival) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["echo-1"], "no name of a corpus either"


def snapshot(site: Site, things: dict[str, str]) -> list[Any]:
    """What the owner sees of all that another tenant must not be able to change."""
    with site.http() as http:
        corpus = http.get(f"/v1/vector_stores/{things['corpus']}").json()
        rest = [http.get(f"/v1/{name}").json()["data"] for name in ("files", "jobs", "schedules", "webhooks", "api_keys")]
    return [corpus, *rest]


def test_unknown_and_anothers_answer_the_same(site: Site) -> None:
    things = owned_things(site)
    rival = other_tenant(site)
    unknown = {name: "unknown" if name != "model" else "echo-1@unknown" for name in things}
    for route in sorted(routes(site), key=order):
        if PROBES[route].other != 404:
            continue
        replies = [call(site, rival, route, what) for what in (things, unknown)]
        shown = [hide(reply.text, what) for reply, what in zip(replies, (things, unknown), strict=True)]
        assert shown[0] == shown[1], route


def hide(text: str, things: dict[str, str]) -> str:
    for id in sorted(set(things.values()), key=len, reverse=True):
        text = text.replace(id, "*")
    return text


def test_owner_is_served_by_every_route(site: Site) -> None:
    things = owned_things(site)
    for route in sorted(routes(site), key=order):
        reply = call(site, site.admin_key, route, things)
        if route == ("DELETE", "/v1/files/{file_id}"):
            things["file_id"] = fresh_document(site, things["corpus"])  # the next deletions need one
        assert reply.status_code == PROBES[route].own, (route, reply.text)


def fresh_document(site: Site, corpus: str) -> str:
    with site.http() as http:
        sent = [("files", ("fresh.txt", b"fresh text"))]
        http.post(f"/v1/corpora/{corpus}/documents", files=sent).raise_for_status()
        site.ingest()
        documents = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
    return next(d["id"] for d in documents if d["path"] == "fresh.txt")


@pytest.mark.parametrize("held", ["read", "write"])
def test_a_scope_opens_its_routes_and_no_others(site: Site, held: str) -> None:
    things = owned_things(site)
    key = site.key(held)
    allowed: dict[str, Callable[[str], bool]] = {
        "read": lambda scope: scope == "read",
        "write": lambda scope: scope not in ("admin", "operator"),
    }
    for route in sorted(routes(site), key=order):
        if allowed[held](PROBES[route].scope):
            if route[0] != "DELETE":
                assert call(site, key, route, things).status_code != 403, route
            continue
        reply = call(site, key, route, things)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "insufficient_scope"), route


def test_a_key_restricted_to_one_corpus_sees_nothing_of_another(site: Site) -> None:
    things = owned_things(site)
    mine = site.corpus_of("mine", {"mine.txt": "My own words."})
    key = site.key("admin", corpora=[mine])
    for route in sorted(routes(site), key=order):
        reply = call(site, key, route, things)
        assert reply.status_code in (200, 403, 404), route
        if reply.status_code == 200:
            assert not any(id in reply.text for id in things.values()), (route, reply.text)
        assert TEXT not in reply.text, route
    with site.http(key) as http:
        assert [store["id"] for store in http.get("/v1/vector_stores").json()["data"]] == [mine]
        assert [file["filename"] for file in http.get("/v1/files").json()["data"]] == ["mine.txt", "new.txt"][
            ::-1
        ]
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["echo-1", "echo-1@mine"]
    assert snapshot(site, things)[0]["file_counts"]["total"] == 1
