"""A folder of objects under crashes, rivals and leftovers."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tier_kit import on_small_disk

from storage.errors import StorageUnavailable
from storage.folder import FolderStore

NAME = "kv/ab/abcd"
OLD, NEW = b"old" * 30_000, b"new!" * 40_000

# Runs a put in which the step number argv[2], counted over all calls to the system, is the process's last.
CRASHING_PUT = """
import builtins, os, pathlib, sys
from storage.folder import FolderStore

store, last, count = FolderStore(sys.argv[1]), int(sys.argv[2]), 0

def step():
    global count
    count += 1
    if count == last:
        os._exit(9)

def counted(function):
    def call(*args, **kwargs):
        step()
        result = function(*args, **kwargs)
        step()
        return result
    return call

class Parts(list):
    def __iter__(self):
        for part in super().__iter__():
            step()
            yield part

for module, names in ((os, ["fsync", "replace", "unlink"]), (builtins, ["open"]), (pathlib.Path, ["mkdir"])):
    for name in names:
        setattr(module, name, counted(getattr(module, name)))
data = memoryview(b"new!" * 40_000)
store.put("kv/ab/abcd", Parts([data[:10], data[10:90_000], data[90_000:]]))
print(count)
"""

RIVAL = """
import sys
from storage.folder import FolderStore

store = FolderStore(sys.argv[1])
data = bytes([int(sys.argv[2])]) * 300_000
sys.stdin.readline()
for _ in range(10):
    store.put("kv/ab/abcd", [data[:7], data[7:]])
"""


def content(store: FolderStore) -> bytes | None:
    size = store.size(NAME)
    if size is None:
        return None
    buffer = bytearray(size)
    assert store.read_into(NAME, memoryview(buffer)) == size
    return bytes(buffer)


def unfinished(root: Path) -> list[str]:
    return os.listdir(root / ".writing")


def crash(root: Path, step: int) -> int:
    """The process's exit code: 9 while there is such a step."""
    command = [sys.executable, "-c", CRASHING_PUT, str(root), str(step)]
    return subprocess.run(command, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize("before", [None, OLD], ids=["first", "overwriting"])
def test_a_writer_killed_at_any_step_leaves_old_or_new_but_never_a_half(tmp_path, before):
    seen, step, code = [], 0, 9
    while code == 9:
        step += 1
        root = tmp_path / str(step)
        store = FolderStore(root)
        if before is not None:
            store.put(NAME, [before])
        code = crash(root, step)
        state = content(store)
        assert state in (before, NEW), step
        assert list(store.list("")) == ([] if state is None else [NAME])
        seen.append(state)
        store.sweep(older_than_s=0)
        assert unfinished(root) == []
        store.put(NAME, [NEW])
        assert content(store) == NEW
    assert code == 0
    assert step > 12
    assert seen == sorted(seen, key=lambda state: state == NEW)  # once new, it stays new
    assert {before, NEW} == set(seen)


@pytest.mark.parametrize(
    "target", ["os.fsync", "os.replace", "builtins.open", "pathlib.Path.mkdir"], ids=lambda name: name
)
def test_a_full_disk_at_any_step_is_unavailable_and_leaves_nothing_behind(tmp_path, monkeypatch, target):
    store = FolderStore(tmp_path)
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        raise OSError(errno.ENOSPC, "No space left on device", "/secret/place")

    with monkeypatch.context() as patch:
        patch.setattr(target, fail)
        with pytest.raises(StorageUnavailable, match="No space left") as caught:
            store.put(NAME, [NEW])
    assert calls
    assert "secret" not in str(caught.value)
    assert unfinished(tmp_path) == []
    assert content(store) is None


def test_a_part_that_fails_leaves_the_old_object_and_nothing_else(tmp_path):
    store = FolderStore(tmp_path)
    store.put(NAME, [OLD])
    with pytest.raises(TypeError):
        store.put(NAME, [b"x", None])  # type: ignore[list-item]
    assert content(store) == OLD
    assert unfinished(tmp_path) == []


def test_sixteen_processes_on_one_name_leave_one_complete_object(tmp_path):
    store = FolderStore(tmp_path)
    rivals = [
        subprocess.Popen([sys.executable, "-c", RIVAL, str(tmp_path), str(number)], stdin=subprocess.PIPE)
        for number in range(16)
    ]
    whole = {bytes([number]) * 300_000 for number in range(16)}
    for rival in rivals:
        rival.stdin.write(b"\n")
        rival.stdin.close()
    while any(rival.poll() is None for rival in rivals):
        assert content(store) in whole | {None}
        time.sleep(0.001)
    assert [rival.returncode for rival in rivals] == [0] * 16
    assert content(store) in whole
    assert list(store.list("")) == [NAME]
    assert unfinished(tmp_path) == []
    assert sum(len(files) for _, _, files in os.walk(tmp_path)) == 1


def test_leftovers_are_not_listed_and_go_once_they_are_stale(tmp_path):
    store = FolderStore(tmp_path)
    store.put(NAME, [OLD])
    fresh, stale = tmp_path / ".writing" / "1-fresh", tmp_path / ".writing" / "2-stale"
    for path in (fresh, stale):
        path.write_bytes(b"half")
    an_hour_ago = time.time() - 3700
    os.utime(stale, (an_hour_ago, an_hour_ago))
    assert list(store.list("")) == [NAME]
    FolderStore(tmp_path)
    assert unfinished(tmp_path) == ["1-fresh"]
    assert content(store) == OLD


def test_strange_files_in_the_folder_are_not_objects(tmp_path):
    store = FolderStore(tmp_path)
    store.put(NAME, [OLD])
    folder = next(tmp_path.glob("kv/ab/=*"))
    for path in (folder / ".DS_Store", folder / "two words", tmp_path / "README", tmp_path / "kv" / "notes"):
        path.write_bytes(b"x")
    assert list(store.list("")) == [NAME]


def test_leaves_of_one_folder_are_spread_over_many(tmp_path):
    store = FolderStore(tmp_path)
    for number in range(60):
        store.put(f"raw/{number}", [b"x"])
    assert len(list((tmp_path / "raw").iterdir())) > 40


def test_a_root_that_was_unmounted_is_unavailable_not_made_anew(tmp_path):
    root = tmp_path / "mount"
    store = FolderStore(root)
    root.rename(tmp_path / "gone")
    with pytest.raises(StorageUnavailable):
        store.put(NAME, [NEW])
    assert not root.exists()


def test_a_folder_in_the_place_of_an_object_is_unavailable(tmp_path):
    store = FolderStore(tmp_path)
    store.put(NAME, [OLD])
    path = next(tmp_path.glob("kv/ab/=*/abcd"))
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageUnavailable):
        content(store)
    with pytest.raises(StorageUnavailable):
        store.put(NAME, [NEW])
    assert unfinished(tmp_path) == []


def test_a_root_that_is_a_file_is_unavailable(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageUnavailable):
        FolderStore(tmp_path / "file")


def test_objects_are_plain_files_for_their_owner(tmp_path):
    FolderStore(tmp_path).put(NAME, [OLD])
    mode = next(tmp_path.glob("kv/ab/=*/abcd")).stat().st_mode
    assert stat.S_ISREG(mode)
    assert not mode & (stat.S_IXUSR | stat.S_IWOTH)


def test_a_file_system_without_hard_links_still_keeps_what_is_there(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    objects = FolderStore(tmp_path)
    assert objects.put_new("note", [b"one"])
    assert not objects.put_new("note", [b"two"])
    buffer = bytearray(3)
    assert objects.read_into("note", memoryview(buffer)) == 3
    assert buffer == b"one"


def test_trouble_while_a_new_object_is_stored_is_no_answer(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageUnavailable):
        FolderStore(tmp_path).put_new("note", [b"one"])


FULL_DISK = """
import json, sys
from pathlib import Path
from storage.errors import StorageUnavailable
from storage.folder import FolderStore

root = Path(sys.argv[1])
store = FolderStore(root)
size, stored, refused = 10_000, {}, 0

def data(number):
    return bytes([number % 251]) * size

def whole():
    again = FolderStore(root)  # as a process that starts now finds it
    for number in stored:
        buffer = bytearray(size + 1)
        assert again.read_into(f"kv/ab/{number:04x}", memoryview(buffer)) == size, number
        assert buffer[:size] == data(number), number
    assert sorted(again.list("")) == sorted(f"kv/ab/{number:04x}" for number in stored)

for number in range(60):
    try:
        stored[number] = store.put(f"kv/ab/{number:04x}", [data(number)[:4_000], data(number)[4_000:]])
    except StorageUnavailable:
        refused += 1
whole()
for number in stored:  # over what is there
    try:
        store.put(f"kv/ab/{number:04x}", [data(number)])
    except StorageUnavailable:
        refused += 1
whole()
left = [path.name for path in store._temp.iterdir()]
for number in list(stored)[:3]:
    assert store.delete(f"kv/ab/{number:04x}")
    del stored[number]
for number in range(100, 102):
    stored[number] = store.put(f"kv/ab/{number:04x}", [data(number)])
whole()
print(json.dumps({"stored": len(stored), "refused": refused, "left": left}))
"""


def test_a_disk_that_is_full_refuses_what_is_new_and_keeps_what_it_has_acknowledged(tmp_path: Path) -> None:
    found = json.loads(on_small_disk(tmp_path, 256, FULL_DISK))
    assert found["stored"] > 10
    assert found["refused"] > 30
    assert found["left"] == [], "what could not be written takes no room"
