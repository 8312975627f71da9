"""The labels' KV before vLLM: read once for an installation, stored, named in plans, and made again when it is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling_kit import SECRET, Compiling, compiling
from fixtures_models import Models
from sqlalchemy import select
from vllm_server_kit import spec_of, vllm_server, vllm_site

from ingest.garbage import orphans
from ingest.purge import sweep
from precompute import rows
from precompute.reader import Reader
from precompute.spec import ReaderSpec
from serving.connector.plan import Plan, Span
from serving.engine.vllm_client import Served, VLLMClient
from serving.engine.vllm_labels import AGAIN_S, GROUP, Label, Labels
from serving.engine.vllm_saved import Shelf
from storage.catalogue.engine import Catalogue, migrate, open_catalogue
from storage.catalogue.schema import KVObject
from storage.folder import FolderStore
from storage.kvstore import KVStore
from storage.tiers.store import object_name
from storage.types import KVRecord

CLOSE = 1e-4
SERVED = Served("served-under-this-name", 2048)


class Site:
    """A catalogue and a store, and a vLLM that writes there."""

    def __init__(self, folder: Path, reader: Reader, spec: ReaderSpec) -> None:
        database = f"sqlite:///{folder / 'catalogue.db'}"
        migrate(database)
        self.catalogue: Catalogue = open_catalogue(database, b"k" * 32)
        self.objects, self.reader, self.spec = FolderStore(folder / "objects"), reader, spec
        self.store = KVStore(self.objects)
        self.vllm: Compiling

    def compute(self, prompt: list[int], span: Span) -> torch.Tensor:
        kv = self.reader.buffer(len(prompt))
        self.reader.prefill(kv, prompt)
        kv[:, 0] = self.reader.rope.unplace(kv[:, 0], torch.arange(len(prompt)))
        return kv[:, :, :, span.start : span.end].contiguous()

    def labels(self) -> Labels:
        """As a process has them that has just begun."""
        shelf = Shelf(self.store, lambda key: self.objects.size(object_name(key)))
        return Labels(self.spec, self.catalogue, shelf, secret=SECRET)

    def make(self, labels: Labels, served: Served = SERVED) -> tuple[Label, ...]:
        async def run() -> None:
            client = VLLMClient(self.vllm.url, 2)
            await labels.make(client, served)
            await client.close()

        asyncio.run(run())
        return labels.known

    def rows(self) -> dict[str, KVObject]:
        with self.catalogue.read() as session:
            return {row.key: row for row in session.scalars(select(KVObject))}


@pytest.fixture
def site(tiny_models: Models, tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, tiny_models.reader("llama"), spec_of(tiny_models.folder("llama")))
    with compiling(made.store, made.compute) as made.vllm:
        yield made
    made.catalogue.close()


def test_labels_are_read_in_one_prompt_as_our_own_reader_reads_them_and_once_for_all_processes(site: Site) -> None:
    known = site.make(site.labels())
    expected = site.reader.label_kv()
    assert len(known) == len(expected) > 3
    for number, (label, kv) in enumerate(zip(known, expected, strict=True), 1):
        assert label.ids == tuple(site.spec.format.label(number))
        record = site.store.get(label.key, site.spec.stored_as("raw"))
        assert isinstance(record, KVRecord)
        assert float((record.kv - kv).abs().max()) < CLOSE
    assert {row.status for row in site.rows().values()} == {"done"}
    assert {row.sharing_group for row in site.rows().values()} == {GROUP}
    assert site.rows().keys() == {label.key for label in known}
    assert site.make(site.labels()) == known
    assert len(site.vllm.bodies) == 1


def test_a_vllm_of_a_shorter_context_reads_as_many_labels_as_it_has_room_for(site: Site) -> None:
    few = site.make(site.labels(), Served("served-under-this-name", 500))
    assert 0 < len(few) < len(site.reader.label_kv())
    assert len(site.vllm.bodies[0]["prompt"]) < 500
    assert site.make(site.labels())[: len(few)] == few, "what stands behind a label is no part of it"


@pytest.mark.parametrize("how", ["plain", "refuse", "400", "500", "lose", "other"])
def test_what_vllm_does_not_store_is_in_no_plan(site: Site, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only what vLLM says nothing against is waited for.
    monkeypatch.setattr("serving.engine.vllm_labels.STORED_S", 0.2 if how == "lose" else float("inf"))
    site.vllm.how = lambda number: how
    labels = site.labels()
    assert site.make(labels) == ()
    assert site.rows() == {}
    site.vllm.how = lambda number: ""
    asked = len(site.vllm.bodies)
    assert site.make(labels) == (), "not again and again: it is a long prompt"
    assert len(site.vllm.bodies) == asked
    labels._not_before -= AGAIN_S
    assert site.make(labels) != ()


def test_no_label_is_an_orphan_and_a_lost_one_is_made_again(site: Site) -> None:
    labels = site.labels()
    known = site.make(labels)
    assert orphans(site.catalogue, list(site.objects.entries("kv/"))) == []
    site.store.delete([known[1].key])
    with site.catalogue.write() as session:
        assert rows.request_repair(session, known[1].key)  # as whoever misses it asks for
    with site.catalogue.write() as session:
        assert not rows.claim(session, "worker", 60, 4096, None).rows  # type: ignore[union-attr]
    sweep(site.catalogue, site.store.delete)
    assert known[1].key not in site.rows()
    assert site.make(labels) == known
    assert len(site.vllm.bodies) == 2
    assert isinstance(site.store.get(known[1].key, site.spec.stored_as("raw")), KVRecord)


def test_plans_name_the_labels_that_stand_right_before_stored_chunks(tiny_models: Models) -> None:
    spec = spec_of(tiny_models.folder("llama"))
    known = tuple(Label(tuple(spec.format.label(number)), f"{number:064x}", 0) for number in (1, 2))

    async def make(*_: Any) -> None:
        pass

    with vllm_server(tiny_models.reader("llama")) as server:
        with vllm_site(server, tiny_models.folder("llama"), labels=SimpleNamespace(known=known, make=make)) as vllm:
            first, second, third = vllm.chunks
            asked = {
                "all stored": vllm.request(chunks=(first, second, third)),
                "first not stored": vllm.request(chunks=(replace(first, kv_key=None), second, third)),
                "a table's header": vllm.request(chunks=(replace(first, header="| a | b |"), second, third)),
                "labels computed": vllm.request(chunks=(first, second, third), method="reuse"),
            }
            found = {}
            for name, request in asked.items():
                vllm.answer(request)
                plan = server.plans[-1]
                assert isinstance(plan, Plan), plan  # signed, of the prompt's own tokens, and sorted
                found[name] = [span for span in plan.spans if span.kind == "label"]
                starts = {span.start for span in plan.spans if span.kind == "chunk"}
                assert all(span.end in starts and span.codec == "raw" for span in found[name])
    assert {name: [span.key for span in spans] for name, spans in found.items()} == {
        "all stored": [known[0].key, known[1].key], "first not stored": [known[1].key], "a table's header": [known[1].key],
        "labels computed": [],
    }  # fmt: skip


def test_an_engine_has_labels_made_when_a_plan_would_first_name_one(site: Site, tiny_models: Models) -> None:
    labels = site.labels()
    with vllm_site(site.vllm, tiny_models.folder("llama"), labels=labels) as made:  # type: ignore[arg-type]
        for method in ("full", "reuse"):
            made.engine.prepare(made.request(method=method))
        assert not made.engine._label, "they are a long prompt, which nobody wants so far"
        made.engine.prepare(made.request())
        end = time.monotonic() + 60
        while not labels.known:
            assert time.monotonic() < end
            time.sleep(0.01)
