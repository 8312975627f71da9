"""Operators make, limit and disable tenants, and read nothing of theirs; tenants share KV only by both words."""

from __future__ import annotations

import time

import openai
import pytest
from api_kit import Site
from sqlalchemy import select

from storage.catalogue.schema import Corpus, KVObject

TEXT = "Invoices are due after thirty days."


def newcomer(site: Site, name: str = "acme", **limits: int) -> str:
    """A new tenant's first admin key."""
    with site.http() as http:
        made = http.post("/v1/tenants", json={"id": name, **limits})
        made.raise_for_status()
        return str(made.json()["api_key"]["key"])


def test_a_new_tenant_is_at_work_with_the_key_of_its_making(site: Site) -> None:
    key = newcomer(site)
    site.corpus_of("mine", {"a.txt": TEXT}, key)
    with site.http(key) as theirs, site.http() as ours:
        assert [store["name"] for store in theirs.get("/v1/vector_stores").json()["data"]] == ["mine"]
        assert ours.get("/v1/vector_stores").json()["data"] == []
        again = ours.post("/v1/tenants", json={"id": "acme"})
        assert (again.status_code, again.json()["error"]["code"]) == (400, "tenant_exists")
        for name in ("Acme", "shared:x", "", "a" * 49, "../x"):
            assert ours.post("/v1/tenants", json={"id": name}).status_code == 400, name


def test_an_operator_without_other_scopes_reads_nothing(site: Site) -> None:
    site.corpus_of("c", {"a.txt": TEXT})
    key = site.key("operator")
    with site.http(key) as http:
        assert http.get("/v1/tenants").json()["data"][0]["id"] == "default"
        for path in ("vector_stores", "files", "models", "audit", "api_keys"):
            assert http.get(f"/v1/{path}").status_code == 403, path


def test_only_an_operator_makes_an_operator(site: Site) -> None:
    admin = site.key("admin")
    with site.http(admin) as http:
        refused = http.post("/v1/api_keys", json={"name": "n", "scopes": ["admin", "operator"]})
        assert refused.status_code == 403
        assert http.get("/v1/tenants").status_code == 403


def test_a_disabled_tenant_s_keys_open_nothing_until_it_is_enabled(site: Site) -> None:
    key = newcomer(site)
    with site.http() as ours, site.http(key) as theirs:
        assert theirs.get("/v1/models").status_code == 200
        ours.post("/v1/tenants/acme", json={"disabled": True}).raise_for_status()
        assert theirs.get("/v1/models").status_code == 401
        assert ours.post("/v1/tenants/default", json={"disabled": True}).status_code == 400
        ours.post("/v1/tenants/acme", json={"disabled": False}).raise_for_status()
        assert theirs.get("/v1/models").status_code == 200


def test_a_key_ends_when_it_says(site: Site) -> None:
    with site.http() as http:
        now = time.time()
        short = http.post("/v1/api_keys", json={"name": "short", "expires_at": now + 1.5}).json()
        assert http.post("/v1/api_keys", json={"name": "past", "expires_at": now - 1}).status_code == 400
    with site.http(short["key"]) as http:
        assert http.get("/v1/models").status_code == 200
        until = time.monotonic() + 30
        while http.get("/v1/models").status_code == 200:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert time.time() >= now + 1.5
        assert http.get("/v1/models").status_code == 401


def test_a_key_that_expires_makes_none_that_outlives_it(site: Site) -> None:
    ends = time.time() + 1000
    with site.http() as http:
        key = http.post("/v1/api_keys", json={"name": "a", "scopes": ["admin"], "expires_at": ends}).json()["key"]
    with site.http(key) as http:
        for later in (None, ends + 1):
            assert http.post("/v1/api_keys", json={"name": "b", "expires_at": later}).status_code == 400
        assert http.post("/v1/api_keys", json={"name": "b", "expires_at": ends - 1}).status_code == 200


# --- sharing KV ---


def kv_keys(site: Site, corpus: str) -> set[str]:
    with site.parts.catalogue.read() as session:
        group = session.get_one(Corpus, corpus).sharing_group
        return set(session.scalars(select(KVObject.key).where(KVObject.sharing_group == group)))


def shared_corpus(site: Site, key: str, group: str | None) -> str:
    with site.http(key) as http:
        corpus: str = http.post("/v1/vector_stores", json={"name": "c"}).json()["id"]
        if group:
            http.put(f"/v1/corpora/{corpus}/settings", json={"sharing": {"group": group}}).raise_for_status()
        sent = [("files", ("a.txt", TEXT.encode()))]
        http.post(f"/v1/corpora/{corpus}/documents", files=sent).raise_for_status()
    site.ingest()
    return corpus


@pytest.mark.parametrize(
    ("first", "second", "same"), [("g", "g", True), (None, None, False), ("g", None, False), ("g", "h", False)]
)
def test_tenants_share_kv_where_both_declare_it_and_nowhere_else(site: Site, first, second, same: bool) -> None:
    keys = [newcomer(site, "one"), newcomer(site, "two")]
    with site.http() as http:
        for group in ("g", "h"):
            http.put(f"/v1/sharing_groups/{group}", json={"tenants": ["one", "two"]}).raise_for_status()
    ours = kv_keys(site, shared_corpus(site, keys[0], first))
    theirs = kv_keys(site, shared_corpus(site, keys[1], second))
    assert ours
    assert theirs
    assert (ours == theirs) is same
    assert ours.isdisjoint(theirs) is not same


def test_a_tenant_s_own_word_is_not_enough_to_share(site: Site) -> None:
    one, two = newcomer(site, "one"), newcomer(site, "two")
    with site.http() as http:
        http.put("/v1/sharing_groups/g", json={"tenants": ["one"]}).raise_for_status()
        assert http.put("/v1/sharing_groups/h", json={"tenants": ["nobody"]}).status_code == 404
    with site.http(two) as http:
        corpus = http.post("/v1/vector_stores", json={"name": "c"}).json()["id"]
        answers = [
            http.put(f"/v1/corpora/{corpus}/settings", json={"sharing": {"group": name}}) for name in ("g", "x", "one")
        ]
    assert [answer.status_code for answer in answers] == [404, 404, 404]
    corpus = shared_corpus(site, one, None)
    with site.http(one) as http:
        late = http.put(f"/v1/corpora/{corpus}/settings", json={"sharing": {"group": "g"}})
        assert late.status_code == 400, "its documents' KV is named under the tenant's own group"


def test_a_tenant_with_shared_corpora_stays_in_its_group(site: Site) -> None:
    key = newcomer(site, "one")
    with site.http() as http:
        http.put("/v1/sharing_groups/g", json={"tenants": ["one"]}).raise_for_status()
        shared_corpus(site, key, "g")
        assert http.put("/v1/sharing_groups/g", json={"tenants": []}).status_code == 400


def test_shared_kv_stays_while_one_of_the_tenants_needs_it(site: Site) -> None:
    keys = [newcomer(site, "one"), newcomer(site, "two")]
    with site.http() as http:
        http.put("/v1/sharing_groups/g", json={"tenants": ["one", "two"]}).raise_for_status()
    ours, theirs = (shared_corpus(site, key, "g") for key in keys)
    needed = kv_keys(site, theirs)
    with site.http(keys[0]) as http:
        http.delete(f"/v1/vector_stores/{ours}").raise_for_status()
    assert needed.isdisjoint(site.work.deleted)
    with site.http(keys[1]) as http:
        http.delete(f"/v1/vector_stores/{theirs}").raise_for_status()
    assert needed <= set(site.work.deleted)


# --- access lists ---


def names_found(site: Site, corpus: str, key: str) -> set[str]:
    with site.http(key) as http:
        hits = http.post(f"/v1/vector_stores/{corpus}/search", json={"query": "invoices"}).json()["data"]
        listed = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
    assert {hit["filename"] for hit in hits} == {file["path"] for file in listed}
    return {file["path"] for file in listed}


def key_for(site: Site, *principals: str) -> str:
    with site.http() as http:
        made = http.post("/v1/api_keys", json={"name": "k", "scopes": ["read"], "principals": list(principals)})
        made.raise_for_status()
        return str(made.json()["key"])


def test_a_corpus_s_rules_say_who_sees_which_paths(site: Site) -> None:
    corpus = site.corpus_of("c", {"open.txt": TEXT, "hr/pay.txt": TEXT + " Pay.", "hr/public.txt": TEXT + " All."})
    hr, nobody = key_for(site, "group:hr"), key_for(site)
    assert names_found(site, corpus, nobody) == {"open.txt", "hr/pay.txt", "hr/public.txt"}
    rules = [{"path": "hr/*", "principals": ["group:hr"]}, {"path": "hr/public.txt", "principals": None}]
    with site.http() as http:
        http.put(f"/v1/corpora/{corpus}/settings", json={"access": rules}).raise_for_status()
    assert names_found(site, corpus, hr) == {"open.txt", "hr/pay.txt", "hr/public.txt"}
    assert names_found(site, corpus, nobody) == {"open.txt", "hr/public.txt"}
    with site.http() as http:  # what comes later is under the rules from its first moment
        sent = [("files", ("hr/new.txt", b"Invoices of the new year."))]
        http.post(f"/v1/corpora/{corpus}/documents", files=sent).raise_for_status()
    site.ingest()
    assert names_found(site, corpus, nobody) == {"open.txt", "hr/public.txt"}
    assert "hr/new.txt" in names_found(site, corpus, hr)
    with site.http(nobody) as http:
        assert "hr" not in http.get(f"/v1/corpora/{corpus}/settings").text, "the rules are for admins"
    with site.http() as http:  # a rule that is taken away opens nothing
        http.put(f"/v1/corpora/{corpus}/settings", json={"access": []}).raise_for_status()
    assert names_found(site, corpus, nobody) == {"open.txt", "hr/public.txt"}


@pytest.mark.parametrize("name", ["group:HR", "group:hr ", "group", 'x", "group:hr', "group:h_", "group:%", "gröup:hr"])
def test_a_name_like_another_one_opens_nothing(site: Site, name: str) -> None:
    corpus = site.corpus_of("c", {"pay.txt": TEXT})
    with site.http() as http:
        rules = [{"path": "*", "principals": ["x", "group:hr"]}]
        http.put(f"/v1/corpora/{corpus}/settings", json={"access": rules}).raise_for_status()
    assert names_found(site, corpus, key_for(site, name)) == set()
    assert names_found(site, corpus, key_for(site, "gröup:x", "group:hr")) == {"pay.txt"}


@pytest.mark.parametrize(("listed", "name"), [(['foo"x'], "x"), (["a", "b"], ", "), (["a\\"], "a"), (['["x"]'], "x")])
def test_what_json_writes_between_names_is_no_name(site: Site, listed: list[str], name: str) -> None:
    corpus = site.corpus_of("c", {"pay.txt": TEXT})
    with site.http() as http:
        rules = [{"path": "*", "principals": listed}]
        http.put(f"/v1/corpora/{corpus}/settings", json={"access": rules}).raise_for_status()
    assert names_found(site, corpus, key_for(site, name)) == set()
    assert names_found(site, corpus, key_for(site, listed[0])) == {"pay.txt"}


def test_a_key_cannot_take_another_key_s_id_for_a_name(site: Site) -> None:
    with site.http() as http:
        other = http.get("/v1/api_keys").json()["data"][0]["id"]
        assert http.post("/v1/api_keys", json={"name": "k", "principals": [other]}).status_code == 400


# --- limits ---


def test_a_tenant_s_tokens_of_a_day_run_out_in_openai_s_words(site: Site) -> None:
    client = site.client(newcomer(site, tokens_per_day=12), max_retries=0)
    ask = {"model": "echo-1", "messages": [{"role": "user", "content": "one two three"}]}
    client.chat.completions.create(**ask)
    site.parts.meter.flush()
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**ask)
    assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")
    assert client.models.list().data, "what costs no tokens goes on"
    site.client(max_retries=0).chat.completions.create(**ask)
    with site.http() as http:
        http.post("/v1/tenants/acme", json={"tokens_per_day": None}).raise_for_status()
    client.chat.completions.create(**ask)
