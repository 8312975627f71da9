"""Two processes on one data folder, each with its disk tier: what one deletes leaves the other's disk and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest
import torch

from serving.parts import Wiring
from serving.settings import Settings
from storage.catalogue.schema import KVObject
from storage.types import KVProfile, KVRecord, Miss

PROFILE = KVProfile(
    model="m", weights="w", tokenizer="t", frame="f", conditioning="c", codec="raw", dtype="float32",
    layers=1, kv_heads=1, head_dim=2,
)  # fmt: skip
KEYS = [f"{number:064x}" for number in range(4)]
ROOM = 1 << 20

# One of them as a server is: it reads what it is told to, ticks when it is told to, and says what it holds.
OTHER = """
import sys
from pathlib import Path
from serving.parts import Wiring
from serving.settings import Settings
from test_two_processes import KEYS, PROFILE, ROOM, where

folder = Path(sys.argv[1])
wiring = Wiring(Settings(data_dir=folder, disk_cache_bytes=ROOM), memory_bytes=ROOM, disk_bytes=ROOM)
for line in sys.stdin:
    match line.split():
        case ["read"]:
            wiring.kv_store.get_many(KEYS, PROFILE, 20)
            assert wiring.kv_store.chain.flush(20)
        case ["tick"]:
            wiring.forget_deleted()
    print(where(wiring), flush=True)
"""


def where(wiring: Wiring) -> str:
    """Which keys the process holds, by tier."""
    chain = wiring.kv_store.chain
    return " ".join(f"{tier}:{''.join(sorted(key[-1] for key in chain.keys(tier)))}" for tier in ("memory", "disk"))


def say(pipe: IO[str] | None, words: str) -> None:
    assert pipe is not None
    pipe.write(words + "\n")
    pipe.flush()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def wiring(tmp_path: Path) -> Wiring:
    """This process's parts, with four records stored and in the catalogue."""
    wiring = Wiring(Settings(data_dir=tmp_path, disk_cache_bytes=ROOM), memory_bytes=ROOM, disk_bytes=ROOM)
    for key in KEYS:
        wiring.kv_store.put(KVRecord(key, PROFILE, (1, 2, 3), torch.zeros(1, 2, 1, 3, 2)))
        row = KVObject(
            key=key, tenant_id="t", sharing_group="t", status="done", tokens=3, bytes=0, attempt=0, created_at=time.time()
        )
        with wiring.catalogue.write() as session:
            session.merge(row)
    assert wiring.kv_store.chain.flush(20)
    return wiring


def test_what_one_process_deletes_leaves_the_tiers_of_the_other(wiring: Wiring, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen(command, text=True, env=environment, **pipes)  # type: ignore[call-overload]
    say(other.stdin, "read")
    assert heard(other) == "memory:0123 disk:0123"
    assert where(wiring) == "memory: disk:0123"
    with wiring.catalogue.write() as session:
        for key in KEYS[:2]:
            session.delete(session.get_one(KVObject, key))
    wiring.delete_kv(KEYS[:2])
    assert where(wiring) == "memory: disk:23"
    say(other.stdin, "tick")
    assert heard(other) == "memory:23 disk:23"
    say(other.stdin, "read")
    assert heard(other) == "memory:23 disk:23"
    assert len(list((tmp_path / "cache").glob("*/*/*.*"))) == 4
    other.kill()
    other.communicate()
    wiring.close()


def test_a_process_that_comes_back_drops_what_was_deleted_meanwhile(wiring: Wiring, tmp_path: Path) -> None:
    wiring.close()
    with wiring.catalogue.write() as session:
        session.delete(session.get_one(KVObject, KEYS[0]))
    again = Wiring(wiring.settings, memory_bytes=ROOM, disk_bytes=ROOM)
    assert where(again) == "memory: disk:0123"
    assert again.forget_deleted() == 1
    assert where(again) == "memory: disk:123"
    assert again.forget_deleted() == 0
    again.close()


def test_a_disk_tier_is_looked_through_part_by_part(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.storage_parts.FORGET_BATCH", 3)
    with wiring.catalogue.write() as session:
        for key in KEYS:
            session.delete(session.get_one(KVObject, key))
    assert [wiring.forget_deleted() for _ in range(3)] == [3, 1, 0]
    wiring.close()


def test_a_disk_tier_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    wiring = Wiring(Settings(data_dir=tmp_path, disk_cache_bytes=ROOM), disk_bytes=ROOM)
    assert "disk" not in wiring.kv_store.chain.counters()
    assert wiring.kv_store.get(KEYS[0], PROFILE) is Miss.ABSENT


def test_a_disk_tier_that_was_switched_off_leaves_nothing(wiring: Wiring, tmp_path: Path) -> None:
    wiring.close()
    off = Wiring(Settings(data_dir=tmp_path))
    assert off.kv_store.keys_in_memory() == []
    assert not list((tmp_path / "cache").glob("*/*/*.*"))


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        (Settings(), 0),
        (Settings(object_store="s3://bucket"), 8 << 30),
        (Settings(object_store="s3://bucket", disk_cache_bytes=0), 0),
        (Settings(disk_cache_bytes=5), 5),
    ],
)
def test_a_disk_tier_stands_in_front_of_s3_or_where_it_is_asked_for(settings: Settings, size: int) -> None:
    assert settings.disk_cache == size
