"""The operator's rules in vLLM's process: its parts pin, fetch, keep and recode in their own tiers. vLLM is not needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_work import Work, make_work
from sqlalchemy import select

from serving.connector import uses
from serving.connector.parts import ConnectorParts
from storage.catalogue.schema import ChunkRow, Document, DocumentUse, KVObject
from storage.folder import FolderStore
from storage.kvstore import KVStore
from storage.types import KVProfile, KVRecord

OURS = KVProfile("m", "w", "t", "f", "filler:0:", "raw", "float32", layers=2, kv_heads=1, head_dim=16)
TOKENS = 16
BYTES = TOKENS * 2 * 2 * 16 * 4


class Process:
    """The parts of a connector whose model is that of OURS, and a catalogue with documents of one chunk each."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("storage.policy.file.LOOK_SECONDS", 0.0)
        self.work: Work = make_work(folder)
        self.corpus = self.work.corpus("c")
        self.rules = folder / "policy.yaml"
        self.rules.write_text("")
        given = {
            "DATA_DIR": folder, "DATABASE_URL": f"sqlite:///{folder / 'catalogue.db'}", "POLICY_FILE": self.rules,
            "OBJECT_STORE": folder / "kv", "TICK_SECONDS": 0.05, "DISK_CACHE_BYTES": 1 << 20, "MEMORY_CACHE_BYTES": 6 * BYTES,
        }  # fmt: skip
        for name, value in given.items():
            monkeypatch.setenv(f"PREREAD_{name}", str(value))
        self.parts = ConnectorParts({})
        self.asked_own = 0

    def own(self) -> dict[str, Any]:
        self.asked_own += 1
        names = ("weights", "dtype", "layers", "kv_heads", "head_dim", "layout", "adapter")
        return {name: getattr(OURS, name) for name in names}

    def add(self, *paths: str, profile: KVProfile = OURS) -> None:
        """Documents whose KV another process has stored; the last is the newest."""
        store = KVStore(FolderStore(self.parts.settings.objects))
        for path in paths:
            self.work.ingest(self.corpus, {path: f"{path} one two three"})
            with self.work.catalogue.write() as session:
                row = session.get_one(KVObject, self.key(path))
                kv = torch.randn(2, 2, 1, TOKENS, 16, generator=torch.Generator().manual_seed(len(path)))
                row.bytes = store.put(KVRecord(row.key, profile, tuple(range(TOKENS)), kv))
                row.status, row.tokens = "done", TOKENS

    def key(self, path: str) -> str:
        query = select(ChunkRow.kv_key).join(Document, Document.id == ChunkRow.document_id).where(Document.path == path)
        with self.work.catalogue.read() as session:
            return str(session.scalars(query).one())

    def use(self, path: str, at: float) -> None:
        """As the API's process writes it down after an answer."""
        with self.work.catalogue.write() as session:
            document = session.scalars(select(Document.id).where(Document.path == path)).one()
            session.merge(DocumentUse(document_id=document, day=int(at // 86400), hits=1, last_at=at))

    def held(self, tier: str) -> dict[str, str]:
        """Path → codec of a copy that is another than the object's."""
        held = self.parts.kv_store.chain.held(tier)
        query = select(Document.path, ChunkRow.kv_key).join(ChunkRow, ChunkRow.document_id == Document.id)
        with self.work.catalogue.read() as session:
            return {path: held[key].codec for path, key in session.execute(query) if key in held}

    def look(self) -> None:
        """What its thread does at a tick that is time for a look."""
        self.parts._own = self.own
        self.parts.placement._next_pass = 0.0
        self.parts.placement.used(self.parts._uses.new(self.parts.policy.current()))
        self.parts.placement.tick()
        assert self.parts.kv_store.chain.flush(20)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    made = Process(tmp_path, monkeypatch)
    yield made
    made.parts.close()
    made.work.catalogue.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_its_own_thread_pins_what_the_rules_say_and_follows_a_change_of_the_file(process: Process) -> None:
    process.add("hot/a.txt", "b.txt", "cold/c.txt")
    process.rules.write_text('rules:\n- {match: {path: "hot/*"}, pin: memory}\n')
    process.parts.keep_in_step(process.own)
    until(lambda: set(process.held("memory")) == {"hot/a.txt"})
    process.rules.write_text('rules:\n- {match: {path: "cold/*"}, pin: disk, codec: {disk: int8}}\n')
    until(lambda: process.held("disk") == {"cold/c.txt": "int8"})
    process.rules.write_text("rules:\n- {pin: nowhere}\n")  # a mistake: the version before holds
    process.rules.write_text("")
    until(lambda: process.held("disk") == {})
    assert process.asked_own == 1, "reading all weights is dear"


def test_a_file_with_mistakes_at_the_start_is_followed_once_it_has_none(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.connector.parts.PASS_SECONDS", 0.05)
    process.add("a.txt")
    process.rules.write_text("rules:\n- {pin: nowhere}\n")
    process.parts.keep_in_step(process.own)
    time.sleep(0.3)
    assert process.held("memory") == {}
    process.rules.write_text("rules:\n- {pin: memory}\n")
    until(lambda: set(process.held("memory")) == {"a.txt"})


def test_a_time_fetches_ahead_of_the_first_question(process: Process) -> None:
    process.add("a.txt")
    process.rules.write_text("rules:\n- {prefetch: every day at 07:45}\n")
    process.look()
    assert process.held("memory") == {}
    [due] = process.parts.placement._due
    process.parts.placement._due[due] = time.time()
    process.look()
    assert set(process.held("memory")) == {"a.txt"}


def test_what_answers_used_is_kept_by_the_catalogues_word(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "FLUSH_SECONDS", 0.0)
    process.add("a.txt", "b.txt", *(f"other{n}.txt" for n in range(8)))
    process.rules.write_text('rules:\n- {match: {path: ["a.txt", "b.txt"]}, keep: {for: 1h}}\n')
    for path in ("a.txt", "b.txt"):
        process.parts.kv_store.get(process.key(path), OURS)
    process.use("a.txt", time.time() - 20)  # written down late
    process.look()
    assert process.parts.placement.pinned("memory") == {process.key("a.txt")}
    for n in range(8):
        process.parts.kv_store.get(process.key(f"other{n}.txt"), OURS)
    assert "a.txt" in process.held("memory")
    assert "b.txt" not in process.held("memory"), "nobody has used it"
    now = time.time()
    process.parts.placement._clock = lambda: now + 3700
    process.look()
    assert process.parts.placement.pinned("memory") == frozenset(), "the same use counts once"
    process.use("a.txt", time.time())
    process.look()
    assert process.parts.placement.pinned("memory") == {process.key("a.txt")}


def test_what_is_of_another_model_than_vllms_is_not_brought(process: Process) -> None:
    process.add("a.txt", profile=replace(OURS, weights="others"))
    process.rules.write_text("rules:\n- {pin: memory}\n")
    process.look()
    assert process.held("memory") == {}
    process.add("newer.txt")
    process.look()
    assert set(process.held("memory")) == {"newer.txt"}, "the newest object says how records are read now"


def test_looks_at_what_has_no_room_read_nothing_more(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process.add(*(f"{n}.txt" for n in range(8)))
    process.rules.write_text("rules:\n- {pin: memory}\n")
    process.look()
    count = len(process.held("memory"))
    assert 0 < count < 8
    assert len(process.parts.tiers.refused("memory")) == 8 - count

    def read(*_: object) -> int:
        raise AssertionError("home is read")

    monkeypatch.setattr(FolderStore, "read_into", read)
    for _ in range(2):
        process.look()
