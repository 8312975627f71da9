"""What the two settings of a child change in its processes, without a model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from serving.parts import Wiring
from serving.settings import Settings, load_settings
from storage.catalogue.schema import KVObject, SiteLink
from storage.errors import UserError
from storage.keys import group_secret
from storage.site_key import SiteKey
from storage.types import KVProfile, KVRecord, Miss

PROFILE = KVProfile(
    model="m", weights="w", tokenizer="t", frame="f", conditioning="c", codec="raw", dtype="float32",
    layers=1, kv_heads=1, head_dim=2,
)  # fmt: skip
KEY = "ab" * 32
SITE = SiteKey("site-1", "default", b"s" * 32, {"default": b"g" * 32})


@pytest.fixture
def wiring(tmp_path: Path) -> Wiring:
    """A child whose parent does not answer."""
    made = Wiring(
        Settings(data_dir=tmp_path, parent_url="http://127.0.0.1:9", parent_key=SITE.text(), tick_seconds=0.2),
        memory_bytes=1 << 20,
    )
    with made.catalogue.write() as session:
        row = KVObject(key=KEY, tenant_id="default", sharing_group="default", tokens=3, created_at=time.time())
        row.status = "done"
        session.add(row)
        session.add(SiteLink(site_id="site-1", cursor=0))
    made.kv_store.put(KVRecord(KEY, PROFILE, (1, 2, 3), torch.zeros(1, 2, 1, 3, 2)))
    return made


def exchange(wiring: Wiring) -> None:
    """What the beat writes down after each exchange that left the site in step."""
    with wiring.catalogue.write() as session:
        session.get_one(SiteLink, "site-1").syncs += 1


def renew(wiring: Wiring) -> None:
    wiring.stay_in_step()
    exchange(wiring)
    wiring.stay_in_step()


def test_stored_kv_is_used_between_an_exchange_and_the_end_of_the_lease(wiring: Wiring) -> None:
    assert wiring.kv_store.get(KEY, PROFILE) is Miss.UNSYNCED
    renew(wiring)
    assert isinstance(wiring.kv_store.get(KEY, PROFILE), KVRecord)
    assert wiring.kv_store.keys_in_memory() == [KEY]
    assert wiring.parent is not None
    time.sleep(max(0.0, wiring.parent.lease.left()) + 0.01)
    assert wiring.kv_store.get(KEY, PROFILE) is Miss.UNSYNCED
    wiring.stay_in_step()
    assert wiring.kv_store.keys_in_memory() == [], "nor does any part of this process use it"
    renew(wiring)
    assert isinstance(wiring.kv_store.get(KEY, PROFILE), KVRecord)
    wiring.close()


def test_the_process_looks_again_when_the_lease_ends(wiring: Wiring) -> None:
    assert wiring.stay_in_step() == 0.2
    exchange(wiring)
    assert wiring.stay_in_step() == 0.2
    assert wiring.parent is not None
    end = time.monotonic() + 30
    while (left := wiring.parent.lease.left()) > 0.15 and time.monotonic() < end:
        time.sleep(0.01)
    if left > 0:  # a busy machine may have slept through it
        assert wiring.stay_in_step() <= 0.15
    wiring.close()


def test_keys_are_the_parents_in_shared_groups_and_this_sites_own_in_others(wiring: Wiring) -> None:
    assert wiring.parent is not None
    assert wiring.parent.group_secret(wiring.secret, "default") == b"g" * 32
    assert wiring.parent.group_secret(wiring.secret, "private") == group_secret(wiring.secret, "private")
    wiring.close()


def test_a_damaged_copy_goes_so_that_the_parents_takes_its_place(wiring: Wiring) -> None:
    name = f"kv/{KEY[:2]}/{KEY}"
    wiring.objects.put(name, [b"damaged"])
    renew(wiring)
    assert wiring.kv_store.get(KEY, PROFILE) is Miss.DAMAGED
    assert wiring.objects.size(name) is None
    with wiring.catalogue.read() as session:
        assert session.get_one(KVObject, KEY).status == "pending"
    assert wiring.parent is not None
    assert wiring.parent.elsewhere([KEY]).stored == {}, "a parent that does not answer has nothing"
    wiring.close()


def test_the_object_of_a_purged_row_is_not_kept(wiring: Wiring) -> None:
    assert wiring._is_needed(KEY)
    with wiring.catalogue.write() as session:
        session.get_one(KVObject, KEY).status = "purge"
    assert not wiring._is_needed(KEY)
    assert not wiring._is_needed("cd" * 32)
    wiring.close()


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({"PREREAD_PARENT_URL": "https://parent"}, "PREREAD_PARENT_KEY"),
        ({"PREREAD_PARENT_KEY": SITE.text()}, "PREREAD_PARENT_URL"),
    ],
)
def test_one_setting_without_the_other_is_refused(environ: dict[str, str], hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        load_settings(environ)


def test_a_site_without_a_parent_uses_its_own_kv_at_once(tmp_path: Path) -> None:
    wiring = Wiring(Settings(data_dir=tmp_path), memory_bytes=1 << 20)
    wiring.kv_store.put(KVRecord(KEY, PROFILE, (1, 2, 3), torch.zeros(1, 2, 1, 3, 2)))
    assert isinstance(wiring.kv_store.get(KEY, PROFILE), KVRecord)
    with pytest.raises(UserError, match="PREREAD_PARENT_URL"):
        _ = wiring.site_sync
    wiring.close()
