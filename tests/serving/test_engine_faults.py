"""Stored KV that is damaged, gone or slow, and documents that go while they are being answered from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit import LIMIT, Service, counted
from sqlalchemy import select

from storage.catalogue.schema import Document
from storage.kvstore import Records
from storage.types import KVRecord

QUESTION = "What is the speed limit for carts inside the harbour?"
FILES = {
    "rules.md": LIMIT.format(10),
    "lamps.txt": "The lamps on the pier are lit at nine, and the harbour master carries the torch himself.",
}


@pytest.fixture
def harbour(service: Service) -> str:
    return service.corpus("harbour", FILES)


def object_path(service: Service, key: str) -> Path:
    [path] = (service.wiring.settings.data_dir / "objects" / "kv").rglob(key)
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 64)


def swap(path: Path) -> None:
    """The other chunk's object in this one's place."""
    [other] = [p for p in path.parents[2].rglob("*") if p.is_file() and p.name != path.name]
    path.write_bytes(other.read_bytes())


def stored(service: Service, key: str) -> torch.Tensor:
    """The KV that the worker's process reads under this key."""
    record = service.worker.kv_store.get(key, service.worker.reader.profile)
    assert isinstance(record, KVRecord), record
    service.worker.kv_store.forget([key])
    return record.kv


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, "damaged"),
    (truncate, "damaged"),
    (extend, "damaged"),
    (swap, "wrong_key"),
    (Path.unlink, "absent"),
]


def said(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def without_stored(service: Service) -> Any:
    """The answer when nothing stored is used: every chunk is computed when asked."""
    held = service.wiring.kv_store.get_many
    service.wiring.kv_store.get_many = lambda *_: Records({})  # type: ignore[method-assign,assignment]
    try:
        answer = service.chat("harbour", QUESTION, method="reuse")
    finally:
        service.wiring.kv_store.get_many = held  # type: ignore[method-assign]
    assert counted(answer)["tokens_reused"] < 100, "the frame alone"
    return answer


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.usefixtures("harbour")
def test_damage_is_named_computed_around_and_repaired(
    service: Service, damage: Callable[[Path], None], reason: str
) -> None:
    whole = service.chat("harbour", QUESTION, method="reuse")
    assert counted(whole)["not_reused"] == []
    [key] = service.kv_keys(FILES["rules.md"])
    original = stored(service, key)

    service.bell.clear()
    damage(object_path(service, key))
    service.forget()
    answer = service.chat("harbour", QUESTION, method="reuse")
    [miss] = counted(answer)["not_reused"]
    assert miss["reason"] == reason
    assert FILES["rules.md"] in answer.citations[0]["quote"]
    assert answer.preread["tokens_computed"] > whole.preread["tokens_computed"]
    assert said(answer).strip()

    assert service.bell.is_set(), "the worker is rung"
    assert service.status(key) == "pending"
    service.work()
    assert service.status(key) == "done"
    torch.testing.assert_close(stored(service, key), original)
    again = service.chat("harbour", QUESTION, method="reuse")
    assert counted(again)["not_reused"] == []
    assert said(again) == said(whole)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.usefixtures("harbour")
def test_an_answer_without_any_stored_kv_is_that_of_full_prefill(
    service: Service, damage: Callable[[Path], None]
) -> None:
    full = service.chat("harbour", QUESTION, method="full", max_tokens=24)
    for text in FILES.values():
        damage(object_path(service, service.kv_keys(text)[0]))
    service.forget()
    answer = service.chat("harbour", QUESTION, method="reuse", max_tokens=24)
    assert len(counted(answer)["not_reused"]) == len(FILES)
    assert said(answer) == said(full)


@pytest.mark.usefixtures("harbour")
def test_a_store_that_stalls_costs_some_patience_and_no_answer(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without_stored(service)
    service.forget()
    monkeypatch.setattr(service.wiring.engine._fetcher._rates, "_fixed_s", 0.1)
    read = service.wiring.objects.read_into
    slow: Any = lambda *a, **k: (time.sleep(1.5), read(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(service.wiring.objects, "read_into", slow)
    answer = service.chat("harbour", QUESTION, method="reuse")
    report = counted(answer)
    assert {miss["reason"] for miss in report["not_reused"]} == {"slow"}
    assert said(answer) == said(expected)
    assert {service.status(key) for text in FILES.values() for key in service.kv_keys(text)} == {"done"}
    monkeypatch.undo()
    time.sleep(1.5)  # the readers that were left behind end
    assert counted(service.chat("harbour", QUESTION))["not_reused"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("change", ["delete", "replace", "close"])
def test_what_goes_while_we_answer_is_not_cited(
    service: Service, harbour: str, monkeypatch: pytest.MonkeyPatch, stream: bool, change: str
) -> None:
    before = service.chat("harbour", QUESTION)
    [file_id] = [c["file_id"] for c in before.citations if c["filename"] == "rules.md"]
    fetch = service.wiring.kv_store.get_many

    def meanwhile(*asked: Any) -> Any:
        """In the engine's own thread, once retrieval has ended and before a word is said."""
        monkeypatch.setattr(service.wiring.kv_store, "get_many", fetch)
        _change(service, harbour, file_id, change)
        return fetch(*asked)

    monkeypatch.setattr(service.wiring.kv_store, "get_many", meanwhile)
    answer = service.chat("harbour", QUESTION, stream=stream)
    if stream:
        answer = next(e for e in answer if e.choices and e.choices[0].finish_reason)
    assert service.wiring.kv_store.get_many == fetch, "the change was made"
    assert [(c["n"], c["filename"]) for c in answer.citations] == [(2, "lamps.txt")], "labels stay as they were said"


def _change(service: Service, corpus: str, file_id: str, change: str) -> None:
    if change == "delete":
        service.client.vector_stores.files.delete(file_id, vector_store_id=corpus)
    elif change == "replace":
        service.upload(corpus, {"rules.md": LIMIT.format(20)})
    else:
        with service.wiring.catalogue.write() as session:
            for document in session.scalars(select(Document).where(Document.file_id == file_id)):
                document.access = ["key-of-somebody-else"]
