"""Corpora that a parent pushes are fetched ahead of any reader, within bounds, and again where something is lacking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_kit import Site
from fixtures_work import paragraphs
from site_kit import FILES, Child, child_in_step, child_of, keys_of, parent_corpus, register, settle

from storage.catalogue import sites
from storage.catalogue.schema import Site as SiteRow
from storage.errors import StorageUnavailable


@pytest.fixture
def corpus(site: Site) -> str:
    return parent_corpus(site, "handbook", FILES)


@pytest.fixture
def child(site: Site, corpus: str, tmp_path: Path) -> Iterator[Child]:
    with child_in_step(site, corpus, tmp_path / "child") as made:
        yield made


def test_pushed_corpora_are_fetched_ahead_of_any_reader(site: Site, corpus: str, tmp_path: Path) -> None:
    parent_corpus(site, "unpushed", {"c.txt": paragraphs(2, tag="c")})
    with child_of(site, tmp_path / "child", register(site)) as child:
        child.ingest({**FILES, "c.txt": paragraphs(2, tag="c")})
        settle(child)
        assert child.sync.replicate(60) == 0
        with site.http() as http:
            pushed = http.post(f"/v1/sites/{child.key.site_id}/push", json={"corpora": ["handbook"]}).json()
        assert pushed["pushed"] == [corpus]
        assert child.sync.replicate(60) == 5
        assert child.here() == set(keys_of(site.work, corpus))
        assert child.sync.replicate(60) == 0
        assert child.link().pulled_objects == 5


def test_replication_is_bounded_resumed_and_repairs_what_was_lost(
    site: Site, corpus: str, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = sorted(keys_of(site.work, corpus))
    with site.parts.catalogue.write() as session:
        sites.replicate(session, session.get_one(SiteRow, child.key.site_id), keys[:4])
        sites.replicate(session, session.get_one(SiteRow, child.key.site_id), keys[2:4])
    for key in keys:
        child.objects.drop(key)
    real = child.sync.pull

    def timed(key: str) -> int:
        child.clock.now += 1.0
        return real(key)

    child.sync.pull = timed
    assert child.sync.replicate(1.5) == 2
    assert child.here() == set(keys[:2])
    assert child.sync.replicate(60) == 2
    assert child.here() == set(keys[:4]), "what nobody asked for is not fetched"
    child.objects.drop(keys[0])
    assert child.sync.replicate(60) == 1


def test_a_parent_that_goes_away_midway_loses_no_progress(site: Site, corpus: str, child: Child) -> None:
    keys = sorted(keys_of(site.work, corpus))
    with site.http() as http:
        http.post(f"/v1/sites/{child.key.site_id}/push").raise_for_status()
    for key in keys:
        child.objects.drop(key)
    real = child.sync.pull

    def failing(key: str) -> int:
        if key == keys[3]:
            raise StorageUnavailable("cut")
        return real(key)

    child.sync.pull = failing
    with pytest.raises(StorageUnavailable):
        child.sync.replicate(60)
    assert child.link().pull_after == keys[2]
    child.sync.pull = real
    child.sync.replicate(60)
    assert child.here() == set(keys)


def test_what_the_site_has_no_document_for_is_not_fetched(site: Site, corpus: str, tmp_path: Path) -> None:
    with child_of(site, tmp_path / "child", register(site)) as child:
        child.ingest({"b.txt": FILES["b.txt"]})
        settle(child)
        with site.http() as http:
            http.post(f"/v1/sites/{child.key.site_id}/push").raise_for_status()
        assert child.sync.replicate(60) == 2
        assert child.here() == set(keys_of(child.work))
