"""Small promises of the wiring, without a model."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from serving.parts import Wiring, model_folder
from serving.processes import Turns, run_worker
from serving.settings import Settings
from storage.catalogue.schema import KVObject
from storage.errors import UserError
from storage.types import KVProfile, KVRecord, Miss

PROFILE = KVProfile(
    model="m", weights="w", tokenizer="t", frame="f", conditioning="c", codec="raw", dtype="float32",
    layers=1, kv_heads=1, head_dim=2,
)  # fmt: skip
KEY = "ab" * 32


@pytest.fixture
def wiring(tmp_path: Path) -> Wiring:
    wiring = Wiring(Settings(data_dir=tmp_path), memory_bytes=1 << 20)
    wiring.kv_store.put(KVRecord(KEY, PROFILE, (1, 2, 3), torch.zeros(1, 2, 1, 3, 2)))
    return wiring


def owe(wiring: Wiring, status: str) -> None:
    with wiring.catalogue.write() as session:
        row = KVObject(
            key=KEY,
            tenant_id="t",
            sharing_group="t",
            status=status,
            tokens=3,
            bytes=0,
            attempt=0,
            created_at=time.time(),
        )
        session.merge(row)


def test_what_another_process_deleted_leaves_this_ones_memory(wiring: Wiring) -> None:
    owe(wiring, "done")
    assert isinstance(wiring.kv_store.get(KEY, PROFILE), KVRecord)
    assert wiring.forget_deleted() == 0
    owe(wiring, "purge")
    assert wiring.forget_deleted() == 1
    assert wiring.kv_store.keys_in_memory() == []
    wiring.close()


@pytest.mark.parametrize(
    ("status", "reason"), [("pending", "pending"), ("leased", "pending"), ("failed", "absent")]
)
def test_a_miss_says_whether_the_work_is_still_owed(wiring: Wiring, status: str, reason: str) -> None:
    owe(wiring, status)
    assert wiring.missed(KEY, Miss.ABSENT) == reason
    assert wiring.missed(KEY, Miss.TIMEOUT) == "timeout"
    wiring.close()


def test_an_object_that_ought_to_be_stored_is_owed_again(wiring: Wiring) -> None:
    owe(wiring, "done")
    wiring.missed(KEY, Miss.ABSENT)
    with wiring.catalogue.read() as session:
        assert session.get_one(KVObject, KEY).status == "pending"
    wiring.close()


class Slow:
    """Work that goes on until it is let go or told to stop."""

    def __init__(self) -> None:
        self.calls = 0
        self.begun = threading.Event()

    def drain(self, stop: Callable[[], bool], seconds: float | None) -> int:
        self.calls += 1
        self.begun.set()
        while not stop():
            time.sleep(0.01)
        return 1


def test_a_bell_during_the_work_adds_no_second_thread_and_a_stop_ends_it() -> None:
    work, stop = Slow(), threading.Event()
    turns = Turns(work, stop, lambda queue: None)
    running = threading.Thread(target=turns.drain, args=(60.0,))
    running.start()
    assert work.begun.wait(5)
    assert turns.drain(60.0) == 0
    stop.set()
    running.join(5)
    assert not running.is_alive()
    assert work.calls == 1


def test_unknown_queues_and_models_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="laundry"):
        run_worker(Settings(data_dir=tmp_path), ["laundry"])
    with pytest.raises(UserError, match="nowhere"):
        model_folder(Settings(data_dir=tmp_path, model="nowhere"))


# A worker as it is started, with work that ends only if both of its queues are worked on at the same time.
OVERLAP = """
import os, sys, threading
from pathlib import Path
from serving import processes
from serving.settings import Settings

met = threading.Barrier(2)


class Both:
    def __init__(self, *_):
        self.ring = lambda queue: None
        self.ingest_worker = self.kv_queue = self

    def drain(self, *_, **__):
        try:
            met.wait(90)
        except threading.BrokenBarrierError:
            os._exit(1)
        print("both", flush=True)
        os._exit(0)


processes.WorkerParts = Both
processes.run_worker(Settings(data_dir=Path(sys.argv[1])), processes.QUEUES)
"""


def test_a_worker_parses_the_next_file_while_it_computes_the_one_before(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OVERLAP, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    assert "both" in done.stdout + done.stderr
