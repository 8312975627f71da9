"""An operator's rules over a whole service with a tiny reader: what is stored, how, and what an answer says of it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from model_kit import Service, Shared, counted, serving

from precompute.calibration import use_codec
from storage.codecs import CODECS
from storage.codecs.raw import Raw
from storage.format import MAGIC

FILES = {
    "open/lamps.txt": "The lamp on the north pier is lit at nine in the evening and burns until six in the morning.",
    "secret/oil.txt": "Oil for the lamp on the south pier costs four crowns a week and is paid by the harbour master.",
}
RULES = """
rules:
  - {name: secret, match: {path: "secret/*"}, store: false}
  - {name: hot, match: {path: "open/*"}, pin: memory}
"""


@dataclass(frozen=True)
class Second(Raw):
    """The same bytes under another name: another codec as far as keys and objects are concerned."""

    name: str = "second"


@pytest.fixture
def two_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    codecs = {**CODECS, "second": Second()}
    for module in ("storage.format", "storage.codecs.shelf", "precompute.queue"):
        monkeypatch.setattr(f"{module}.CODECS", codecs)
    monkeypatch.setattr("storage.policy.parse.CODEC_NAMES", tuple(codecs))


def codecs_on_disk(folder: Path) -> list[str]:
    """The codec in the header of every stored object."""
    found = []
    for path in sorted((folder / "objects" / "kv").rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            assert data.startswith(MAGIC)
            length = struct.unpack_from("<8sII", data)[2]
            found.append(json.loads(data[16 : 16 + length])["profile"]["codec"])
    return found


def reasons(answer: Any) -> list[str]:
    return [each["reason"] for each in answer.preread["not_reused"]]


def test_rules_hold_from_ingest_to_the_answer_and_its_cost(shared: Shared, tmp_path: Path) -> None:
    rules = tmp_path / "policy.yaml"
    rules.write_text(RULES)
    with serving(shared, tmp_path / "data", dtype="float32", policy_file=str(rules)) as service:
        corpus = service.corpus("piers", FILES)
        assert len(codecs_on_disk(tmp_path / "data")) == 1, "the secret is not at rest"
        service.wiring.placement.tick()
        assert service.wiring.kv_store.chain.flush(20)
        assert service.wiring.kv_store.keys_in_memory() == service.kv_keys("north")
        answer = service.chat(corpus, "When is the lamp lit and what does oil cost?")
        report = counted(answer)
        assert report["chunks"] == 2
        assert reasons(answer) == ["policy"]
        assert report["tokens_reused"] + report["tokens_recomputed"] > 0
        hits = service.wiring.kv_store.counters()
        assert hits["hits_memory"] == 1, "it was there before anybody asked"
        service.wiring.meter.flush()
        [bucket] = service.call("GET", "/usage", params={"limit": 1})["data"]
        [result] = bucket["results"]
        assert result["input_cached_tokens"] == report["tokens_reused"]
        assert result["preread"]["tokens_compiled"] > 0
        assert result["preread"]["gpu_seconds_saved"] > 0, "the speed is measured at ingest"
        [held] = service.call("GET", "/storage")["corpora"]
        assert held["tiers"]["memory"] == {**held["tiers"]["object"], "pinned": 1, "rules": {"pin": {"hot": 1}}}
        assert held["tiers"]["object"]["pinned"] == 0
        assert held["not_stored"] == {"secret": 1}


def test_a_rule_chooses_the_codec_of_what_is_stored(shared: Shared, tmp_path: Path, two_codecs: None) -> None:
    rules = tmp_path / "policy.yaml"
    rules.write_text('rules:\n- {match: {path: "secret/*"}, codec: {object: second}}\n- {pin: memory}\n')
    with serving(shared, tmp_path / "data", dtype="float32", policy_file=str(rules)) as service:
        corpus = service.corpus("piers", FILES)
        assert sorted(codecs_on_disk(tmp_path / "data")) == ["raw", "second"]
        answer = service.chat(corpus, "When is the lamp lit and what does oil cost?")
        assert reasons(answer) == [], "both are read, each as it was written"
        service.forget()
        service.wiring.placement.tick()
        assert service.wiring.kv_store.chain.flush(20)
        assert len(service.wiring.kv_store.keys_in_memory()) == 2, "both are pinned"


def test_a_rule_may_choose_the_transform_codec_in_a_store_that_has_no_basis_yet(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tmp_path / "policy.yaml"
    rules.write_text('rules:\n- {match: {path: "secret/*"}, codec: transform}\n- {pin: memory}\n')
    with serving(shared, tmp_path / "data", dtype="float32", policy_file=str(rules)) as service:
        reader = service.wiring.reader  # that of other tests as well, with another store
        monkeypatch.setattr(reader, "codec_named", reader.codec_named)
        use_codec(reader, "raw", service.wiring.kv_store.codecs)
        corpus = service.corpus("piers", FILES)
        raw, chosen = sorted(codecs_on_disk(tmp_path / "data"))
        assert raw == "raw"
        assert chosen == service.wiring.reader.stored_as("transform").codec
        assert reasons(service.chat(corpus, "When is the lamp lit and what does oil cost?")) == []
        service.forget()
        service.wiring.placement.tick()
        assert service.wiring.kv_store.chain.flush(20)
        assert len(service.wiring.kv_store.keys_in_memory()) == 2, "both are pinned"


def test_another_codec_later_replaces_what_is_stored(
    shared: Shared, tmp_path: Path, two_codecs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.policy.file.LOOK_SECONDS", 0.0)
    rules = tmp_path / "policy.yaml"
    rules.write_text("")
    with serving(shared, tmp_path / "data", dtype="float32", policy_file=str(rules)) as service:
        corpus = service.corpus("piers", FILES)
        assert codecs_on_disk(tmp_path / "data") == ["raw", "raw"]
        rules.write_text("rules:\n- {codec: second}\n")
        beat(service)
        service.work()
        beat(service)
        assert codecs_on_disk(tmp_path / "data") == ["second", "second"], "and the old ones are gone"
        assert reasons(service.chat(corpus, "When is the lamp lit and what does oil cost?")) == []
        rules.write_text("")
        beat(service)
        service.work()
        beat(service)
        assert codecs_on_disk(tmp_path / "data") == ["raw", "raw"], "a rule that goes is undone"


def beat(service: Service) -> None:
    service.worker.ticker.tick()
