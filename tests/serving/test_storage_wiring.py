"""What the parts make of the settings for storage: whose key seals an object, and why a chunk has no stored KV."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_models import Models

from ingest.files import owner_part, raw_name
from precompute.calibration import use_codec
from precompute.reader import Reader
from serving.parts import Wiring
from serving.settings import load_settings
from storage.catalogue.schema import KVObject
from storage.folder import FolderStore
from storage.types import Miss

KEY = "ab" * 32


@pytest.fixture
def wiring(tmp_path: Path) -> Iterator[Wiring]:
    made = Wiring(load_settings({"PREREAD_DATA_DIR": str(tmp_path), "PREREAD_ENCRYPTION_KEYS": "master"}))
    yield made
    made.close()


def add_row(wiring: Wiring, status: str) -> None:
    with wiring.catalogue.write() as session:
        row = KVObject(key=KEY, tenant_id="t1", sharing_group="group", status=status, tokens=5, created_at=time.time())
        session.merge(row)


def owner_of(wiring: Wiring, name: str) -> bytes:
    header = bytearray(64)
    FolderStore(wiring.settings.objects).read_into(name, memoryview(header))
    return bytes(header[32:48])


def test_an_api_before_vllm_has_no_tiers_to_pin_anything_in(tmp_path: Path) -> None:
    made = Wiring(load_settings({"PREREAD_DATA_DIR": str(tmp_path), "PREREAD_ENGINE": "vllm"}))
    assert made.tiers.tiers == ()
    made.placement.used({KEY: "document"})
    made.placement.tick()
    assert not made.placement._used, "what answers used does not pile up"
    made.close()


def test_a_broken_basis_is_made_again_if_the_model_makes_the_same(tiny_models: Models, tmp_path: Path) -> None:
    made = Wiring(load_settings({"PREREAD_DATA_DIR": str(tmp_path)}))
    made.__dict__["_reader"] = read = Reader(tiny_models.folder("llama"), dtype="float32", filler=1)
    use_codec(read, "transform8", made.kv_store.codecs)
    [name] = made.objects.list("basis/")
    whole = made.objects.size(name)
    for damage in (lambda: made.objects.put(name, [b"x"]), lambda: made.objects.delete(name)):
        damage()
        assert made.restore_basis(name.removeprefix("basis/"))
        assert made.objects.size(name) == whole
    assert not made.restore_basis("ab" * 32), "no model here has this one"
    assert list(made.objects.list("basis/")) == [name]
    made.close()


def test_kv_is_sealed_for_its_sharing_group_and_a_file_for_its_tenant(wiring: Wiring) -> None:
    add_row(wiring, "leased")
    kv, raw = f"kv/ab/{KEY}", raw_name("t1", "cd" * 32)
    for name in (kv, raw):
        wiring.objects.put(name, [b"words"])
    assert owner_of(wiring, kv) == hashlib.sha256(b"group").digest()[:16]
    assert owner_of(wiring, raw) == hashlib.sha256(owner_part("t1").encode()).digest()[:16]
    buffer = bytearray(5)
    assert wiring.objects.read_into(kv, memoryview(buffer)) == 5
    assert buffer == b"words"


@pytest.mark.parametrize(("status", "reason"), [("over_quota", "over_quota"), ("pending", "pending"), ("failed", "absent")])
def test_an_answer_says_why_a_chunk_has_no_stored_kv(wiring: Wiring, status: str, reason: str) -> None:
    add_row(wiring, status)
    assert wiring.missed(KEY, Miss.ABSENT) == reason
