"""A parent behind a long and thin wire, which is cut in the middle: the child's answers are right at once, and soon fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from api_kit import Site
from engine_kit import EngineSite
from fixtures_models import Models
from fixtures_work import paragraphs
from s3_kit import readers, until
from site_kit import LEASE, Child, child_of, keys_of, object_name, parent_corpus, record, register
from wire import Wire

from storage.errors import StorageUnavailable
from storage.folder import FolderStore
from storage.format import encode, is_whole
from storage.peer import PeerStore
from storage.readthrough import ReadThrough
from storage.types import KVRecord

RTT_S = 0.1
FILES: dict[str, str | bytes] = {"a.txt": paragraphs(3, tag="a"), "b.txt": paragraphs(2, tag="b")}


@pytest.fixture
def corpus(site: Site) -> str:
    return parent_corpus(site, "handbook", FILES)


@pytest.fixture
def wire(site: Site) -> Iterator[Wire]:
    made = Wire(site.url)
    made.rtt_s = RTT_S
    yield made
    made.close()


def settle(child: Child) -> None:
    until(lambda: child.sync.step(), "the child in step")


def test_over_a_long_wire_objects_arrive_whole_and_deletions_reach_the_site(
    site: Site, corpus: str, wire: Wire, tmp_path: Path
) -> None:
    wire.bytes_per_s = 20_000
    with child_of(site, tmp_path / "child", register(site), wire.url) as child:
        child.ingest(FILES)
        settle(child)
        for key in keys_of(child.work):
            until(lambda key=key: isinstance(child.read(key), KVRecord), "its object, which a busy machine may be too late with")
            found = child.read(key)
            assert isinstance(found, KVRecord)
            assert found.kv.equal(record(key).kv)
        doomed = set(keys_of(child.work, path="a.txt"))
        with site.http() as http:
            documents = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
            file = next(d["id"] for d in documents if d["path"] == "a.txt")
            gone = http.delete(f"/v1/vector_stores/{corpus}/files/{file}").json()
        wire.cut()
        with pytest.raises(StorageUnavailable):
            child.sync.step()
        assert doomed <= child.here(), "it cannot know yet"
        wire.heal()
        settle(child)
        assert child.here().isdisjoint(doomed)
        settle(child)
        child.clock.now += LEASE
        settle(child)
        with site.http() as http:
            assert http.get(f"/v1/purges/{gone['job_id']}").json()["sites"][0]["state"] == "erased"


class FarSite:
    """An engine at a child whose KV is all at the parent."""

    def __init__(self, site: Site, wire: Wire, models: Models, folder: Path) -> None:
        self.peer = PeerStore(wire.url, register(site), read_s=5)
        self.local = FolderStore(folder)
        self.objects = ReadThrough(self.local, self.peer, lambda key: True)
        self.engine = EngineSite(models.reader("llama"), folder, patience_s=0.05, objects=self.objects)
        near, self.keys = self.engine.chunks, keys_of(site.work)[:3]
        for chunk, key in zip(near, self.keys, strict=True):
            mine = self.engine.kv.get(str(chunk.kv_key), self.engine.reader.profile)
            assert isinstance(mine, KVRecord)
            site.parts.objects.put(object_name(key), encode(replace(mine, key=key)))
        self.engine.engine._fetcher._rates._fixed_s = 20.0
        self.whole = self.engine.answer().text
        self.engine.engine._fetcher._rates._fixed_s = 0.05
        self.full = self.engine.answer(method="full").text
        self.engine.chunks = tuple(replace(c, kv_key=key) for c, key in zip(near, self.keys, strict=True))

    def here(self) -> list[str]:
        """The keys that have come, each of which is whole."""
        found = [key for key in self.keys if self.local.size(object_name(key)) is not None]
        for key in found:
            data = memoryview(bytearray(self.local.size(object_name(key)) or 0))
            self.local.read_into(object_name(key), data)
            assert is_whole(data, key)
        return found


@pytest.fixture
def far(site: Site, corpus: str, wire: Wire, tiny_models: Models, tmp_path: Path) -> Iterator[FarSite]:
    made = FarSite(site, wire, tiny_models, tmp_path / "near")
    yield made
    made.engine.engine.close()
    until(lambda: not readers(), "the end of its reads")
    made.peer.close()


def test_a_far_parent_is_not_waited_for_and_what_it_sent_answers_when_the_wire_is_cut(far: FarSite, wire: Wire) -> None:
    wire.bytes_per_s = 60_000
    first = far.engine.answer()
    assert first.text == far.full != far.whole
    assert {c.reason for c in first.report.not_reused} == {"slow"}
    until(lambda: len(far.here()) == 3, "all of it here")
    wire.cut()
    far.engine.engine._fetcher._rates._fixed_s = 20.0
    second = far.engine.answer()
    assert second.text == far.whole
    assert [(c.chunk_id, c.tier) for c in second.report.reused] == [(n, "store") for n in range(3)]
    assert far.objects.counters()["objects"] == 3


def test_a_wire_cut_in_the_middle_of_an_object_leaves_no_half_and_is_used_again(far: FarSite, wire: Wire) -> None:
    wire.bytes_per_s = 30_000
    asked = far.engine.answer()
    assert asked.text == far.full
    wire.cut()
    until(lambda: far.objects.counters()["unavailable"] + far.objects.counters()["timeout"] > 0, "the cut to be noticed")
    assert len(far.here()) < 3
    assert far.engine.answer().text == far.full
    wire.heal()
    wire.bytes_per_s = None
    until(lambda: far.engine.answer().report.not_reused == [], "the parent to be asked again")
    assert far.engine.answer().text == far.whole
    assert len(far.here()) == 3
