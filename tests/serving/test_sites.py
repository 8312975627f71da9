"""Who gets which stored KV: every URL that is not signed for exactly this, by a site that may have it, opens nothing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from api_kit import SECRET, Site
from fixtures_work import paragraphs
from site_kit import ask, call, keys_of, object_name, parent_corpus, record, register
from sqlalchemy import select, update

from serving.auth import NewKey, Principal, create_key
from serving.doors.sites import Signed, find_object
from storage.catalogue.schema import Corpus, KVObject, Tenant
from storage.errors import ObjectMissing
from storage.format import encode
from storage.site_key import LIFE_SECONDS, SKEW_SECONDS, SiteKey, signature, site_secret

TEXT = paragraphs(3)


@pytest.fixture
def corpus(site: Site) -> str:
    return parent_corpus(site, "handbook", {"a.txt": TEXT})


@pytest.fixture
def key(site: Site, corpus: str) -> SiteKey:
    return register(site)


@pytest.fixture
def name(site: Site, corpus: str) -> str:
    return object_name(keys_of(site.work)[0])


def refused(site: Site, key: SiteKey, method: str, name: str, query: str) -> bool:
    answer = ask(site, key, method, name, query=query)
    assert b"KV" not in answer.content
    return answer.status_code == 401


def test_a_site_fetches_what_it_may_hold_whole_and_in_ranges(site: Site, key: SiteKey, name: str) -> None:
    data = b"".join(encode(record(name.rpartition("/")[2])))
    whole = ask(site, key, "GET", name)
    assert (whole.status_code, whole.content) == (200, data)
    head = ask(site, key, "HEAD", name)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(data)), b"")
    part = ask(site, key, "GET", name, headers={"range": "bytes=5-9"})
    assert (part.status_code, part.content) == (206, data[5:10])
    assert part.headers["content-range"] == f"bytes 5-9/{len(data)}"
    tail = ask(site, key, "GET", name, headers={"range": f"bytes={len(data) - 3}-{len(data) + 50}"})
    assert (tail.status_code, tail.content) == (206, data[-3:])
    assert ask(site, key, "GET", name, headers={"range": f"bytes={len(data)}-{len(data)}"}).status_code == 416


def test_a_url_opens_one_object_by_one_method_for_one_site(site: Site, key: SiteKey, name: str) -> None:
    now = site.parts.clock()
    other_name = object_name(keys_of(site.work)[1])
    other_site = register(site, "another")
    assert refused(site, key, "GET", other_name, key.query("GET", name, now))
    assert refused(site, key, "HEAD", name, key.query("GET", name, now))
    assert refused(site, key, "GET", name, key.query("HEAD", name, now))
    assert refused(site, other_site, "GET", name, key.query("GET", name, now))
    assert refused(site, key, "GET", name, other_site.query("GET", name, now))
    assert refused(site, replace(key, site_id="site-unknown"), "GET", name, key.query("GET", name, now))


def test_an_unsigned_url_is_refused(site: Site, key: SiteKey, name: str) -> None:
    for query in ("", "expires=99999999999", f"signature={'0' * 64}", "expires=x&signature=y"):
        assert ask(site, key, "GET", name, query=query).status_code == 400


def test_a_forged_or_altered_signature_is_refused(site: Site, key: SiteKey, name: str) -> None:
    expires = int(site.parts.clock()) + LIFE_SECONDS
    mac = signature(key.secret, "GET", key.site_id, name, expires)
    flipped = ("0" if mac[0] != "0" else "1") + mac[1:]
    assert refused(site, key, "GET", name, f"expires={expires}&signature={flipped}")
    assert refused(site, key, "GET", name, f"expires={expires + 1}&signature={mac}")
    guess = replace(key, secret=site_secret(b"not the master", key.site_id))
    assert refused(site, key, "GET", name, guess.query("GET", name, site.parts.clock()))
    assert ask(site, key, "GET", name, query=f"expires={expires}&signature={mac}").status_code == 200


def test_an_expired_url_is_refused_and_so_is_one_for_too_long(site: Site, key: SiteKey, name: str) -> None:
    now = site.parts.clock()
    assert refused(site, key, "GET", name, key.query("GET", name, now - LIFE_SECONDS - SKEW_SECONDS - 2))
    assert refused(site, key, "GET", name, key.query("GET", name, now + SKEW_SECONDS + 3))
    assert ask(site, key, "GET", name, now=now - SKEW_SECONDS).status_code == 200


def test_a_removed_site_gets_nothing_with_urls_signed_before_or_after(site: Site, key: SiteKey, name: str) -> None:
    before = key.query("GET", name, site.parts.clock())
    assert ask(site, key, "GET", name, query=before).status_code == 200
    with site.http() as http:
        assert http.delete(f"/v1/sites/{key.site_id}").json()["deleted"] is True
        assert http.get("/v1/sites").json()["data"] == []
        assert http.delete(f"/v1/sites/{key.site_id}").status_code == 404
    assert refused(site, key, "GET", name, before)
    assert refused(site, key, "GET", name, key.query("GET", name, site.parts.clock()))
    assert call(site, key, "sync", {"cursor": 0, "erased": 0}).status_code == 401


def test_a_calls_body_is_signed_too(site: Site, key: SiteKey) -> None:
    body = {"cursor": None, "erased": 0}
    assert call(site, key, "sync", body).status_code == 200
    assert call(site, key, "sync", body, signed_as={"cursor": 0, "erased": 0}).status_code == 401
    assert call(site, key, "compare", {"keys": ["nonsense"]}).status_code == 400
    assert call(site, key, "anything", {}).status_code == 400


def test_documents_and_all_else_are_never_served(site: Site, key: SiteKey) -> None:
    raw = list(site.parts.objects.list("raw/"))
    assert raw
    known = keys_of(site.work)[0]
    tricks = (f"kv/00/{known}", f"kv/{known}", f"kv/{known[:2]}/{known}/", f"basis/../{raw[0]}", f"kv/../{raw[0]}", "basis/", "")
    for name in (*raw, "health/probe", *tricks):
        expires = int(site.parts.clock()) + LIFE_SECONDS
        signed = Signed("GET", key.site_id, name, expires, signature(key.secret, "GET", key.site_id, name, expires))
        with pytest.raises(ObjectMissing):
            find_object(site.parts, signed)
    assert ask(site, key, "GET", raw[0]).status_code == 404


def test_codecs_bases_are_served_to_every_site(site: Site, key: SiteKey) -> None:
    site.parts.objects.put("basis/abc", [b"basis"])
    assert ask(site, key, "GET", "basis/abc").content == b"basis"
    assert ask(site, key, "GET", "basis/abd").status_code == 404


def test_a_site_gets_the_kv_of_its_corpora_only(site: Site, corpus: str) -> None:
    shared = paragraphs(1, tag="shared")
    second = parent_corpus(site, "second", {"b.txt": paragraphs(2, tag="other") + "\n\n" + shared})
    parent_corpus(site, "third", {"c.txt": shared})
    key = register(site, "narrow", [second])
    mine, others = keys_of(site.work, second), keys_of(site.work, corpus)
    assert len(mine) == 3
    assert all(ask(site, key, "GET", object_name(each)).status_code == 200 for each in mine)
    assert all(ask(site, key, method, object_name(each)).status_code == 404 for each in others for method in ("GET", "HEAD"))
    found = call(site, key, "compare", {"keys": [*mine, *others]}).json()
    assert set(found["stored"]) == set(mine)
    assert key.groups.keys() == {"default"}


def test_another_tenants_kv_is_not_served_even_by_its_key(site: Site, corpus: str) -> None:
    with site.parts.catalogue.write() as session:
        session.add(Tenant(id="rival", name="rival", created_at=time.time()))
    actor = Principal("rival", None, frozenset({"admin"}))
    rival = str(create_key(site.parts.catalogue, SECRET, actor, NewKey("rival", ("admin",)))["key"])
    with site.http(rival) as http:
        key = SiteKey.parse(http.post("/v1/sites", json={"name": "spy"}).json()["key"])
    assert key.groups.keys() == {"rival"}
    for each in keys_of(site.work):
        assert ask(site, key, "GET", object_name(each)).status_code == 404
    assert call(site, key, "compare", {"keys": keys_of(site.work)}).json() == {"stored": {}, "awaited": []}


def test_what_is_deleted_is_not_served_a_moment_later(site: Site, corpus: str, key: SiteKey, name: str) -> None:
    with site.http() as http:
        file = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"][0]["id"]
        assert ask(site, key, "GET", name).status_code == 200
        http.delete(f"/v1/vector_stores/{corpus}/files/{file}").raise_for_status()
    site.parts.objects.put(name, [b"left behind by a store that was down"])
    assert ask(site, key, "GET", name).status_code == 404


def test_what_is_not_computed_yet_is_awaited_and_what_was_lost_is_computed_again(
    site: Site, corpus: str, key: SiteKey, name: str
) -> None:
    lost = name.rpartition("/")[2]
    site.parts.objects.delete(name)
    site.rung.clear()
    assert ask(site, key, "GET", name).status_code == 404
    assert site.rung == ["precompute"]
    found = call(site, key, "compare", {"keys": [lost]}).json()
    assert found == {"stored": {}, "awaited": [lost]}


def test_names_are_unique_and_a_removed_one_is_free_again(site: Site, key: SiteKey) -> None:
    with site.http() as http:
        assert http.post("/v1/sites", json={"name": "edge"}).status_code == 400
        assert http.post("/v1/sites", json={"name": "no/slash"}).status_code == 400
        assert http.post("/v1/sites", json={"name": "x", "corpora": ["unknown"]}).status_code == 404
        http.delete(f"/v1/sites/{key.site_id}").raise_for_status()
        again = http.post("/v1/sites", json={"name": "edge"}).json()
    assert again["id"] != key.site_id
    assert SiteKey.parse(again["key"]).secret != key.secret


def test_a_restricted_admin_registers_and_sees_only_within_its_corpora(site: Site, corpus: str, key: SiteKey) -> None:
    mine = site.corpus_of("mine", {"m.txt": "My own words."})
    restricted = site.key("admin", corpora=[mine])
    with site.http(restricted) as http:
        assert http.post("/v1/sites", json={"name": "all"}).status_code == 403
        assert http.post("/v1/sites", json={"name": "theirs", "corpora": [corpus]}).status_code == 404
        assert http.post("/v1/sites", json={"name": "own", "corpora": [mine]}).status_code == 200
        assert [site["name"] for site in http.get("/v1/sites").json()["data"]] == ["own"]
        assert http.post(f"/v1/sites/{key.site_id}/push").status_code == 404


def test_no_answer_but_the_first_holds_the_key(site: Site, key: SiteKey) -> None:
    with site.http() as http:
        texts = [http.get("/v1/sites").text, http.post(f"/v1/sites/{key.site_id}/push").text, http.get("/v1/audit").text]
    assert all(key.secret.hex() not in text and key.text() not in text for text in texts)


def test_a_corpus_that_is_shared_has_its_groups_secret_in_the_key(site: Site, corpus: str) -> None:
    from storage.keys import group_secret

    with site.parts.catalogue.write() as session:
        session.execute(update(Corpus).where(Corpus.id == corpus).values(sharing_group="all of us"))
    key = register(site, "shared", [corpus])
    assert key.groups == {"all of us": group_secret(SECRET, "all of us")}
    with site.parts.catalogue.read() as session:
        assert session.scalar(select(KVObject.key).limit(1)) is not None


def test_the_metrics_say_how_far_each_site_is(site: Site, key: SiteKey) -> None:
    with site.http() as http:
        before = http.get("/metrics").text
        call(site, key, "sync", {"cursor": 0, "erased": 0}).raise_for_status()
        after = http.get("/metrics").text
    assert 'preread_site_tombstones_pending{site="edge"} 0.0' in before
    assert 'preread_site_silent_seconds{site="edge"} +Inf' in before
    assert 'preread_site_silent_seconds{site="edge"} +Inf' not in after
