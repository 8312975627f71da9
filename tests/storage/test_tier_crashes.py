"""Processes killed at any moment: what was acknowledged is there, and the disk tier's next owner finds it in order."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from kv_samples import PROFILE, same
from tier_kit import COPIES, ENVIRONMENT, KEYS, RECORDS, SIZE, always, bytes_on_disk, home_of

from storage.kvstore import KVStore
from storage.objects import open_store
from storage.tiers.disk import DiskTier
from storage.types import KVRecord, Miss, ObjectStore

# Does argv[2] to a disk tier that holds three copies and is full; the step number argv[3], counted over all calls to
# the system, is the process's last. Runs the steps one after another in forked children: one import for all.
CRASHING = """
import builtins, os, pathlib, shutil, sys
from tier_kit import COPIES, KEYS, SIZE, always
from storage.tiers.disk import DiskTier

root, action = pathlib.Path(sys.argv[1]), sys.argv[2]
count = last = 0

def step():
    global count
    count += 1
    if count == last:
        os.kill(os.getpid(), 9)

def counted(function):
    def call(*args, **kwargs):
        step()
        result = function(*args, **kwargs)
        step()
        return result
    return call

def act(folder):
    disk = DiskTier(folder, 3 * SIZE)
    for module, names in ((os, ["replace", "unlink", "open"]), (builtins, ["open"]), (pathlib.Path, ["mkdir"])):
        for name in names:
            setattr(module, name, counted(getattr(module, name)))
    if action == "promote":
        class Parts(list):
            def __iter__(self):
                for part in super().__iter__():
                    step()
                    yield part
        object.__setattr__(COPIES[3], "encoded", Parts(COPIES[3].encoded))
        assert disk.offer(COPIES[3], always)
    elif action == "recode":
        disk.keep_as({KEYS[3]: "int8"})
        assert disk.offer(COPIES[3], always) and disk.held()[KEYS[3]].codec == "int8"
    elif action == "delete":
        disk.forget(KEYS[:2])
    else:
        disk.close()
        DiskTier(folder, SIZE).close()  # takes stock, and evicts two

while True:
    last += 1
    folder = root / str(last)
    shutil.copytree(root / "full", folder)
    child = os.fork()
    if not child:
        act(folder)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 9:
        break
print(last)
"""

# Writes, reads, evicts and deletes with four threads until it is killed; says what it is about to do and has done.
BUSY = """
import json, random, sys, threading
from kv_samples import PROFILE
from pathlib import Path
from tier_kit import KEYS, RECORDS, SIZE
from storage.kvstore import KVStore
from storage.objects import open_store
from storage.tiers.disk import DiskTier

root, home = Path(sys.argv[1]), json.loads(sys.argv[3])
disk = DiskTier(root / "cache", 5 * SIZE)
store = KVStore(open_store(**home), memory_bytes=4 * SIZE, device_bytes=2 * SIZE, disk=disk)
said = threading.Lock()

def say(*words):
    with said:
        print(*words, flush=True)

def work(number):
    choice = random.Random(f"{sys.argv[2]} {number}")
    mine = RECORDS[number::4]
    while True:
        each = choice.choice(mine)
        say("?", each.key)
        if choice.random() < 0.3:
            store.delete([each.key])
            say("-", each.key)
        else:
            store.put(each)
            say("+", each.key)
        store.get_many(choice.sample(KEYS, 6), PROFILE, 20)

for number in range(4):
    threading.Thread(target=work, args=(number,)).start()
"""


@pytest.mark.parametrize(("action", "least"), [("promote", 10), ("recode", 8), ("delete", 4), ("restart", 6)])
def test_a_disk_tier_killed_at_any_step_is_in_order_for_the_next_process(tmp_path: Path, action: str, least: int) -> None:
    full = DiskTier(tmp_path / "full", 3 * SIZE)
    for copy in COPIES[:3]:
        full.offer(copy, always)
    full.close()
    command = [sys.executable, "-W", "ignore", "-c", CRASHING, str(tmp_path), action]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert ended.returncode == 0, ended.stderr
    steps = int(ended.stdout)
    assert steps > least
    home = home_of(tmp_path / "home")
    for step in range(1, steps + 1):
        disk = DiskTier(tmp_path / str(step), 3 * SIZE)
        assert disk.folder.name == "0", "the lock died with the process"
        assert not list(disk.folder.rglob("*.writing"))
        assert disk.counters()["bytes"] == bytes_on_disk(disk.folder) <= 3 * SIZE
        store = KVStore(home, disk=disk)
        found = store.get_many(KEYS[:4], PROFILE, 20)
        assert all(same(found[each.key], each) for each in RECORDS[:4])
        assert disk.counters()["damaged"] == 0
        assert store.chain.flush(20)
        disk.close()


@pytest.fixture(params=["folder", pytest.param("s3", marks=[pytest.mark.services, pytest.mark.slow])])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, str]:
    """What `open_store` makes an empty home of."""
    if request.param == "folder":
        return {"url": str(tmp_path / "home")}
    server = request.getfixturevalue("s3_server")
    keys = {"s3_access_key": server.access_key, "s3_secret_key": server.secret_key}
    return {"url": f"s3://crashes/{uuid.uuid4().hex}", "s3_endpoint": server.endpoint, **keys}


def test_a_process_killed_while_it_does_everything_loses_nothing_acknowledged(
    tmp_path: Path, home: Mapping[str, str]
) -> None:
    """Killed again and again over the same folders. `state`: what each key's last end was; None if it was cut off."""
    objects = open_store(**home)
    state: dict[str, bool | None] = dict.fromkeys(KEYS, False)
    choice, ended = random.Random(5), 0
    for seed in range(3):
        command = [sys.executable, "-c", BUSY, str(tmp_path), str(seed), json.dumps(home)]
        busy = subprocess.Popen(command, text=True, env=ENVIRONMENT, stdout=subprocess.PIPE)
        assert busy.stdout is not None
        lines = [busy.stdout.readline() for _ in range(choice.randint(80, 160))]
        busy.send_signal(signal.SIGKILL)
        lines += busy.stdout.read().splitlines()
        busy.communicate()
        for sign, key in (line.split() for line in lines if len(line.strip()) == 66):
            state[key] = None if sign == "?" else sign == "+"
            ended += sign != "?"
        _check(tmp_path, objects, state)
    assert ended > 80
    assert set(state.values()) >= {True, False}


def _check(root: Path, objects: ObjectStore, state: dict[str, bool | None]) -> None:
    disk = DiskTier(root / "cache", 5 * SIZE)
    assert disk.folder.name == "0"
    assert not list(disk.folder.rglob("*.writing"))
    assert disk.counters()["bytes"] == bytes_on_disk(disk.folder) <= 5 * SIZE
    home, store = KVStore(objects), KVStore(objects, disk=disk)
    for each in RECORDS:
        found, there = home.get(each.key, PROFILE), state[each.key]
        assert found is Miss.ABSENT or same(found, each)
        if there is not None:
            assert isinstance(found, KVRecord) is there, "acknowledged"
        # What the killed process had not forgotten yet the tick does: whoever asks in between gets right KV.
        cached = store.get(each.key, PROFILE)
        assert cached is Miss.ABSENT or same(cached, each)
    assert disk.counters()["damaged"] == 0
    assert store.chain.flush(20)
    disk.close()
