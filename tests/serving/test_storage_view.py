"""GET /v1/storage, /readyz and /metrics: what lies where, which rule says so, and a broken file that everybody sees."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from api_kit import Site, running_site
from sqlalchemy import func, select
from test_api_routes import other_tenant
from test_usage import RATES, TEXT, ask

from serving.cli_storage_view import _storage
from storage.catalogue.schema import KVObject
from storage.folder import FolderStore
from storage.kvstore import KVStore
from storage.policy import file as policy_file
from storage.tier_control import ChainControl
from storage.tiers.disk import DiskTier
from storage.tiers.types import Copy, Extent
from storage.types import KVProfile, KVRecord

RULES = """
rules:
  - {name: secret, match: {path: "secret/*"}, store: false}
  - {name: hot, match: {corpus: terms}, pin: memory, replicate: lyon}
"""


@pytest.fixture
def ruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(policy_file, "LOOK_SECONDS", 0.0)
    (tmp_path / "policy.yaml").write_text(RULES + RATES)
    with running_site(tmp_path) as made:
        made.work.policy = made.parts.placement.policy.current()
        yield made


UNSAID: dict[str, Any] = {"refused": 0, "codecs": {}, "rules": {}}


def by_profile(keys: Collection[str]) -> dict[KVProfile, dict[str, Extent]]:
    profile = KVProfile("m", "w", "t", "f", "c", "raw", "float32", layers=1, kv_heads=1, head_dim=16)
    return {profile: dict.fromkeys(keys, Extent(1000, 1000))}


def storage(site: Site, key: str | None = None) -> dict[str, Any]:
    with site.http(key) as http:
        reply = http.get("/v1/storage")
        reply.raise_for_status()
        return {one["name"]: one for one in reply.json()["corpora"]}


def metrics(site: Site) -> dict[str, float]:
    with site.http("") as http:
        lines = http.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_it_says_what_lies_where_why_and_what_it_costs_and_saves(ruled: Site) -> None:
    corpus = ruled.corpus_of("terms", {"terms.txt": TEXT, "copy.txt": TEXT, "secret/a.txt": "Nobody must know of this."})
    ruled.parts.placement.tick()
    ask(ruled, corpus)
    ruled.parts.meter.flush()
    found = storage(ruled)["terms"]
    with ruled.parts.catalogue.read() as session:
        objects = session.scalar(select(func.count()).select_from(KVObject).where(KVObject.status == "done"))
    held = {"chunks": objects, "bytes": 10 * objects, "pinned": 0}
    assert found["tiers"]["object"] == {**held, **UNSAID}, "ten bytes each, copies once"
    assert found["rules"]["pin"] == {"hot": 3}
    assert found["rules"]["replicate"] == {"hot": 3}
    assert found["rules"]["store"] == {"secret": 1, "default": 2}
    assert found["not_stored"] == {"secret": 1}
    assert found["tokens_not_recomputed"] > 0
    assert found["gpu_seconds_saved"] == pytest.approx(found["tokens_not_recomputed"] / 10)
    assert found["cost_per_month"] == pytest.approx(10 * objects / 1e9 * 1_000_000)
    shown = metrics(ruled)
    owner = f'corpus="{corpus}",tenant="default"'
    assert shown[f'preread_stored_bytes{{{owner},tier="object"}}'] == 10 * objects
    assert shown[f"preread_tokens_not_recomputed_total{{{owner}}}"] == found["tokens_not_recomputed"]
    assert shown[f'preread_money{{corpus="{corpus}",kind="saved",tenant="default"}}'] == pytest.approx(found["money_saved"])
    assert shown[f"preread_stored_money_per_month{{{owner}}}"] == pytest.approx(found["cost_per_month"])


def test_it_says_which_copies_came_through_another_codec_and_the_bytes_they_take(ruled: Site, tmp_path: Path) -> None:
    corpus = ruled.corpus_of("terms", {"terms.txt": TEXT})
    with ruled.parts.catalogue.read() as session:
        keys = [str(key) for key in session.scalars(select(KVObject.key).where(KVObject.status == "done"))]
    chain = KVStore(FolderStore(tmp_path / "copies"), memory_bytes=1 << 20).chain
    ruled.parts.placement.tiers = ChainControl(chain, lambda keys: {})
    kv = torch.zeros(1, 2, 1, 4, 16)
    for key, codec in zip(keys, ("int8", "", "int8"), strict=False):
        profile = KVProfile("m", "w", "t", "f", "c", "raw", "float32", layers=1, kv_heads=1, head_dim=16)
        assert chain._memory.offer(Copy(KVRecord(key, profile, (1, 2, 3, 4), kv.clone()), codec=codec), lambda: True)
    held = storage(ruled)["terms"]["tiers"]["memory"]
    count = min(3, len(keys))
    assert held["chunks"] == count
    assert held["bytes"] == count * kv.nbytes
    assert held["codecs"] == {"int8": 2 if count == 3 else 1}
    shown = _storage({"corpora": [storage(ruled)["terms"]], "policy": {"status": "ok"}})
    assert f"{held['codecs']['int8']} through int8" in shown
    owner = f'corpus="{corpus}",tenant="default"'
    assert metrics(ruled)[f'preread_stored_bytes{{{owner},tier="memory"}}'] == count * kv.nbytes


def test_each_tier_says_which_rules_speak_of_it_and_of_no_other(ruled: Site, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("""
rules:
  - {name: hot, match: {path: "hot/*"}, pin: memory, codec: {store: int8}}
  - {name: near, match: {path: "hot/*"}, keep: {tier: disk, for: 1h}, codec: {disk: int4}}
  - {name: dawn, match: {path: "dawn/*"}, prefetch: {at: every day at 07:45, tier: disk}}
""")
    ruled.corpus_of("terms", {"hot/a.txt": TEXT, "dawn/b.txt": f"dawn {TEXT}", "c.txt": f"other {TEXT}"})
    disk = DiskTier(tmp_path / "cache", 1 << 20)
    chain = KVStore(FolderStore(tmp_path / "copies"), memory_bytes=100, disk=disk).chain
    ruled.parts.placement.tiers = ChainControl(chain, by_profile)
    ruled.parts.placement.tick()
    assert chain.flush(20)
    tiers = storage(ruled)["terms"]["tiers"]
    assert tiers["object"]["rules"] == {"codec": {"hot": 1}}
    assert tiers["memory"]["rules"] == {"pin": {"hot": 1}}
    assert tiers["disk"]["rules"] == {"keep": {"near": 1}, "disk_codec": {"near": 1}, "prefetch": {"dawn": 1}}
    pinned = tiers["memory"]["pinned"]
    assert tiers["memory"]["refused"] == pinned > 0, "100 bytes have room for none"
    assert tiers["disk"]["refused"] == 0
    shown = _storage({"corpora": [storage(ruled)["terms"]], "policy": {"status": "ok"}})
    why = {line.split()[1]: line for line in shown.splitlines() if line.startswith("terms ")}
    assert why["object"].endswith("default, codec by hot")
    assert why["memory"].endswith(f"pin by hot, no room for {pinned} pinned")
    assert set(why["disk"].split("  ")[-1].strip().split(", ")) == {"keep by near", "codec by near", "prefetch by dawn"}
    (tmp_path / "policy.yaml").write_text("rules:\n- {name: all, codec: {store: int8, disk: int4}}\n")
    ruled.parts.placement.tick()
    shown = _storage({"corpora": [storage(ruled)["terms"]], "policy": {"status": "ok"}})
    why = {line.split()[1]: line for line in shown.splitlines() if line.startswith("terms ")}
    assert why["object"].split("  ")[-1].strip() == "codec by all", "no document is as it would be without rules"
    assert why["memory"].endswith("used lately")
    assert why["disk"].endswith("used lately, codec by all")
    disk.close()


def test_each_admin_sees_only_what_is_theirs(ruled: Site) -> None:
    mine = ruled.corpus_of("terms", {"terms.txt": TEXT})
    ruled.corpus_of("hidden", {"h.txt": f"hidden {TEXT}"})
    assert set(storage(ruled)) == {"terms", "hidden"}
    assert set(storage(ruled, ruled.key("admin", corpora=[mine]))) == {"terms"}
    assert storage(ruled, other_tenant(ruled)) == {}


def test_a_change_of_the_file_is_in_force_and_a_broken_one_is_seen_by_all(ruled: Site, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    corpus = ruled.corpus_of("terms", {"terms.txt": TEXT})
    ruled.parts.placement.tick()
    assert storage(ruled)["terms"]["rules"]["pin"] == {"hot": 1}
    path.write_text("rules:\n- {name: cold, pin: disk}\n")
    ruled.parts.placement.tick()
    assert storage(ruled)["terms"]["rules"]["pin"] == {"cold": 1}
    path.write_text("rules:\n- {name: worse, pin: ram}\n")
    ruled.parts.placement.tick()
    assert storage(ruled)["terms"]["rules"]["pin"] == {"cold": 1}, corpus
    with ruled.http("") as http:
        ready = http.get("/readyz")
    assert ready.status_code == 200, "it answers as before"
    assert "mistakes" in ready.json()["policy"]
    assert "ram" not in ready.text, "the file is the operator's, the page is everybody's"
    shown = metrics(ruled)
    assert (shown["preread_policy_file_broken"], shown["preread_policy_failures_total"]) == (1, 1)
    assert shown["preread_policy_reloads_total"] == 1
    path.write_text("rules: []\n")
    ruled.parts.placement.tick()
    with ruled.http("") as http:
        assert http.get("/readyz").json()["policy"] == "ok"


def test_without_rates_and_without_a_measured_speed_savings_are_unknown_not_zero(tmp_path: Path) -> None:
    with running_site(tmp_path) as site:
        corpus = site.corpus_of("terms", {"terms.txt": TEXT})
        assert storage(site)["terms"]["gpu_seconds_saved"] == 0.0, "nothing was reused"
        ask(site, corpus)
        site.parts.meter.flush()
        found = storage(site)["terms"]
        assert (found["gpu_seconds_saved"], found["money_saved"], found["currency"]) == (None, None, None)
        assert found["tokens_not_recomputed"] > 0
