"""Deletions reach every site, in an order that nothing slips through, and the receipt says when."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_kit import Site
from fixtures_work import open_work, paragraphs
from site_kit import EXCHANGE, FILES, LEASE, Child, call, child_in_step, child_of, keys_of, parent_corpus, register, settle
from sqlalchemy import select

from storage.catalogue import sites, tombstones
from storage.catalogue.engine import migrate, open_catalogue
from storage.catalogue.schema import KVObject, SiteLink, Tombstone
from storage.catalogue.schema import Site as SiteRow
from storage.errors import StorageUnavailable
from storage.types import KVRecord, Miss


@pytest.fixture
def corpus(site: Site) -> str:
    return parent_corpus(site, "handbook", FILES)


@pytest.fixture
def child(site: Site, corpus: str, tmp_path: Path) -> Iterator[Child]:
    with child_in_step(site, corpus, tmp_path / "child") as made:
        yield made


def delete_file(site: Site, corpus: str, path: str) -> dict[str, Any]:
    with site.http() as http:
        documents = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
        file = next(d["id"] for d in documents if d["path"] == path)
        gone: dict[str, Any] = http.delete(f"/v1/vector_stores/{corpus}/files/{file}").json()
    return gone


def receipt(site: Site, gone: dict[str, Any]) -> dict[str, Any]:
    with site.http() as http:
        shown: dict[str, Any] = http.get(f"/v1/purges/{gone['job_id']}").json()
    return shown


def test_a_deletion_leaves_catalogue_and_store_of_a_site_and_nothing_else_does(
    site: Site, corpus: str, child: Child
) -> None:
    doomed, kept = set(keys_of(child.work, path="a.txt")), set(keys_of(child.work, path="b.txt"))
    delete_file(site, corpus, "a.txt")
    settle(child)
    assert child.here() == kept
    assert child.rows() == dict.fromkeys(kept, "done")
    assert all(child.read(key) is Miss.ABSENT for key in doomed)


def test_the_receipt_names_each_site_pending_and_then_erased_a_lease_later(
    site: Site, corpus: str, child: Child
) -> None:
    silent = register(site, "silent")
    gone = delete_file(site, corpus, "a.txt")
    assert [(s["site"], s["state"]) for s in gone["sites"]] == [("edge", "pending"), ("silent", "pending")]
    settle(child)
    settle(child)
    assert receipt(site, gone)["sites"][0]["state"] == "pending", "a process of the site may still have it in memory"
    child.clock.now += LEASE
    settle(child)
    shown = receipt(site, gone)
    assert shown["status"] == "in_progress"
    assert [s["state"] for s in shown["sites"]] == ["erased", "pending"]
    assert shown["sites"][0]["at"] >= shown["created_at"]
    with site.http() as http:
        http.delete(f"/v1/sites/{silent.site_id}").raise_for_status()
    ended = receipt(site, gone)
    assert (ended["status"], ended["sites"][1]["state"]) == ("completed", "removed")
    assert ended["receipt"] == gone["receipt"]


def test_a_receipt_does_not_count_what_was_erased_before(site: Site, corpus: str, child: Child) -> None:
    """An old acknowledgement is none for a new deletion, and a new one covers the old."""
    first = delete_file(site, corpus, "a.txt")
    settle(child)
    settle(child)
    child.clock.now += LEASE
    settle(child)
    second = delete_file(site, corpus, "b.txt")
    states = [receipt(site, gone)["sites"][0]["state"] for gone in (first, second)]
    assert states == ["erased", "pending"]


def test_a_site_registered_later_is_on_no_earlier_receipt(site: Site, corpus: str) -> None:
    gone = delete_file(site, corpus, "a.txt")
    register(site, "newcomer")
    assert receipt(site, gone)["sites"] == []


def test_what_another_document_holds_stays_at_every_site(site: Site, tmp_path: Path) -> None:
    shared = paragraphs(2, tag="shared")
    corpus = parent_corpus(site, "c", {"one.txt": shared, "two.txt": shared})
    with child_of(site, tmp_path / "child", register(site)) as child:
        child.ingest({"one.txt": shared})
        settle(child)
        assert all(isinstance(child.read(key), KVRecord) for key in keys_of(child.work))
        delete_file(site, corpus, "two.txt")
        settle(child)
        assert child.here() == set(keys_of(child.work))
        delete_file(site, corpus, "one.txt")
        settle(child)
        assert child.here() == set()


def test_what_leaves_a_sites_corpora_leaves_the_site_though_the_parent_keeps_it(site: Site, tmp_path: Path) -> None:
    shared = paragraphs(2, tag="shared")
    open_to_it = parent_corpus(site, "open", {"one.txt": shared})
    parent_corpus(site, "closed", {"two.txt": shared})
    with child_of(site, tmp_path / "child", register(site, corpora=[open_to_it])) as child:
        child.ingest({"one.txt": shared})
        settle(child)
        assert all(isinstance(child.read(key), KVRecord) for key in keys_of(child.work))
        delete_file(site, open_to_it, "one.txt")
        settle(child)
        assert child.here() == set()


def test_a_whole_corpus_is_erased_page_by_page(
    site: Site, corpus: str, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "PAGE", 2)
    with site.http() as http:
        http.delete(f"/v1/vector_stores/{corpus}").raise_for_status()
    assert [child.sync.step() for _ in range(3)] == [False, False, True]
    assert child.here() == set()


class Down:
    """A store whose deletions fail until it is back."""

    def __init__(self, child: Child) -> None:
        self.child, self.down = child, True

    def delete(self, keys: Any) -> object:
        if self.down:
            raise StorageUnavailable("the store is down")
        return self.child.store.delete(keys)


def test_what_a_store_could_not_delete_is_not_acknowledged_and_not_renewed(
    site: Site, corpus: str, child: Child
) -> None:
    store = Down(child)
    child.sync.kv_delete = store.delete
    gone = delete_file(site, corpus, "a.txt")
    before = child.link().syncs
    for _ in range(3):
        with pytest.raises(StorageUnavailable):
            child.sync.step()
        child.clock.now += LEASE
    assert child.link().syncs == before
    assert receipt(site, gone)["sites"][0]["state"] == "pending"
    store.down = False
    child.sync.kv_delete = lambda keys: keys[:1]  # one object that its store will not delete
    with pytest.raises(StorageUnavailable, match="1 objects"):
        child.sync.step()
    assert child.link().syncs == before
    child.sync.kv_delete = store.delete
    settle(child)
    child.clock.now += LEASE
    settle(child)
    child.clock.now += LEASE
    settle(child)
    assert child.here() == set(keys_of(child.work, path="b.txt"))
    assert receipt(site, gone)["sites"][0]["state"] == "erased"


def test_an_exchange_that_took_too_long_does_not_renew(child: Child) -> None:
    before = child.link().syncs
    real = child.peer.call

    def slow(name: str, body: dict[str, Any]) -> dict[str, Any]:
        child.clock.now += EXCHANGE + 0.1
        return real(name, body)

    child.sync.parent = type("Slow", (), {"call": staticmethod(slow)})()
    assert child.sync.step() is False
    assert child.link().syncs == before


def test_a_document_that_came_back_before_the_site_asked_stays(site: Site, corpus: str, child: Child) -> None:
    delete_file(site, corpus, "a.txt")
    again = parent_corpus(site, "again", {"a.txt": FILES["a.txt"]})
    settle(child)
    assert child.here() == set(keys_of(child.work))
    assert set(keys_of(site.work, again)) <= child.here()


def test_a_new_registration_first_erases_what_was_deleted_while_nobody_told(
    site: Site, corpus: str, child: Child
) -> None:
    """Removed, a deletion, registered again: the new key knows of no tombstone, and compares."""
    with site.http() as http:
        http.delete(f"/v1/sites/{child.key.site_id}").raise_for_status()
    with pytest.raises(StorageUnavailable):
        child.sync.step()
    delete_file(site, corpus, "a.txt")
    tombstones.prune(site.parts.catalogue)
    with child_of(site, child.local._root.parent / "again", register(site)) as again:  # type: ignore[attr-defined]
        again.sync.catalogue, again.sync.kv_delete = child.work.catalogue, child.store.delete
        settle(again)
    kept = set(keys_of(child.work, path="b.txt"))
    assert child.here() == kept
    statuses = child.rows()
    assert {key for key, status in statuses.items() if status == "done"} == kept
    assert set(statuses.values()) == {"done", "pending"}, "the site's own documents are computed again"


@pytest.mark.parametrize("where", ["child", "parent"])
def test_a_catalogue_restored_from_a_backup_is_noticed(site: Site, corpus: str, child: Child, where: str) -> None:
    delete_file(site, corpus, "a.txt")
    settle(child)
    settle(child)
    child.clock.now += LEASE
    settle(child)
    if where == "child":  # its cursor is from before what it has acknowledged
        with child.work.catalogue.write() as session:
            session.get_one(SiteLink, child.key.site_id).cursor = 0
        child.sync._erased = 0  # and its processes are new ones
    else:
        with site.parts.catalogue.write() as session:
            session.get_one(SiteRow, child.key.site_id).erased = 0
            for row in session.scalars(select(Tombstone)):
                session.delete(row)
    assert child.sync.step() is False
    assert child.link().cursor is None
    settle(child)
    assert child.link().cursor == tombstones.newest(site.parts.catalogue)


def test_a_restart_of_the_site_repeats_no_acknowledgement_too_early(site: Site, corpus: str, child: Child) -> None:
    gone = delete_file(site, corpus, "a.txt")
    settle(child)
    child.sync._reached.clear()
    child.sync._erased = 0
    settle(child)
    assert receipt(site, gone)["sites"][0]["state"] == "pending"
    child.clock.now += LEASE
    settle(child)
    assert receipt(site, gone)["sites"][0]["state"] == "erased"


def test_a_site_cannot_acknowledge_what_it_was_not_told(site: Site, corpus: str, child: Child) -> None:
    gone = delete_file(site, corpus, "a.txt")
    reply = call(site, child.key, "sync", {"cursor": child.link().cursor, "erased": 10**9}).json()
    assert reply["reset"] is True
    reply = call(site, child.key, "sync", {"cursor": 10**9, "erased": 10**9}).json()
    assert reply["reset"] is True
    assert receipt(site, gone)["sites"][0]["state"] == "pending"


def test_two_threads_may_begin_a_registration(site: Site, corpus: str, tmp_path: Path) -> None:
    with child_of(site, tmp_path / "child", register(site)) as child, ThreadPoolExecutor(4) as pool:
        links = list(pool.map(lambda _: child.sync._link(), range(8)))
    assert {(link.site_id, link.cursor, link.syncs, link.pull_after) for link in links} == {(child.key.site_id, None, 0, "")}


# --- numbers ---


@pytest.mark.services
def test_a_deletion_that_commits_late_is_numbered_late(postgres_url: str, tmp_path: Path) -> None:
    """Two deletions at once: whichever commits later has the higher number, so that no cursor has passed it."""
    migrate(postgres_url)
    one, other = open_catalogue(postgres_url), open_catalogue(postgres_url)
    work = open_work(tmp_path, postgres_url)
    corpus = work.corpus()
    work.ingest(corpus, FILES)
    with work.catalogue.read() as session:
        rows = session.scalars(select(KVObject).order_by(KVObject.key)).all()
    with one.write() as slow:
        tombstones.bury(slow, rows[:1])
        slow.flush()
        with other.write() as quick:
            tombstones.bury(quick, rows[1:2])
        handed_out = tombstones.newest(other)
    assert tombstones.newest(other) == handed_out + 1
    with other.read() as session:
        last = session.scalars(select(Tombstone).order_by(Tombstone.seq.desc())).first()
    assert last is not None
    assert last.key == rows[0].key
    for catalogue in (one, other, work.catalogue):
        catalogue.close()


def test_numbers_go_on_after_everything_was_erased_and_dropped(site: Site, corpus: str, child: Child) -> None:
    delete_file(site, corpus, "a.txt")
    highest = tombstones.newest(site.parts.catalogue)
    assert highest == 3
    tombstones.prune(site.parts.catalogue)
    assert site.work.count(Tombstone) == 3, "the site has not erased them"
    settle(child)
    settle(child)
    child.clock.now += LEASE
    settle(child)
    tombstones.prune(site.parts.catalogue)
    assert site.work.count(Tombstone) == 1
    delete_file(site, corpus, "b.txt")
    assert tombstones.newest(site.parts.catalogue) == highest + 2
    settle(child)
    assert child.here() == set()


def test_without_sites_tombstones_do_not_pile_up(site: Site, corpus: str) -> None:
    delete_file(site, corpus, "a.txt")
    delete_file(site, corpus, "b.txt")
    tombstones.prune(site.parts.catalogue)
    assert site.work.count(Tombstone) == 1
