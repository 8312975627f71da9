"""Records, copies and bounded tiers for the tests of tiers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from kv_samples import record

from storage.folder import FolderStore
from storage.format import encode
from storage.tiers.disk import DiskTier
from storage.tiers.records import RecordTier
from storage.tiers.store import object_name
from storage.tiers.types import CacheTier, Copy, Extent
from storage.types import KVRecord

RECORDS = [record(tokens=200 + number % 3, seed=number) for number in range(24)]
KEYS = [each.key for each in RECORDS]
COPIES = [Copy(each, encode(each)) for each in RECORDS]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
SIZE = 8192  # of any of them on disk, in blocks
KV_SIZE = max(each.kv.nbytes for each in RECORDS)

# Every bounded tier, with room for so many records; the tests of what is common to them run over all.
TIERS: Mapping[str, Callable[[Path, int], CacheTier]] = {
    "memory": lambda folder, room: RecordTier("memory", room * KV_SIZE),
    "device": lambda folder, room: RecordTier("device", room * KV_SIZE, "cpu"),
    "disk": lambda folder, room: DiskTier(folder / "cache", room * SIZE),
}


def extents(keys: Sequence[str]) -> dict[str, Extent]:
    """What to prefetch, of any of the records."""
    return dict.fromkeys(keys, Extent(SIZE, KV_SIZE))


def always() -> bool:
    """A copy that no deletion has overtaken."""
    return True


def home_of(folder: Path, records: list[KVRecord] = RECORDS) -> FolderStore:
    """An object store that holds the records."""
    objects = FolderStore(folder)
    for each in records:
        objects.put(object_name(each.key), encode(each))
    return objects


def cached_file(disk: DiskTier, key: str) -> Path:
    [path] = disk.folder.glob(f"{key[:2]}/{key}.*")
    return path


def bytes_on_disk(folder: Path) -> int:
    """In blocks, as the disk counts them, while nobody writes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def run_script(script: str, *args: str, inside: Sequence[str] = ()) -> str:
    """What a Python script prints; the tests' modules are there to import."""
    command = [*inside, sys.executable, "-c", script, *args]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def on_small_disk(folder: Path, kilobytes: int, script: str, *args: str) -> str:
    """What a script prints to which `folder`, its argv[1], is a file system of its own, of so many kilobytes. Skips
    the test where the system lets nobody mount one."""
    mount = f"mount -t tmpfs -o size={kilobytes}k none '{folder}'"
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here (unshare --user --mount)")
    return run_script(script, str(folder), *args, inside=[*namespace, f'{mount} && exec "$0" "$@"'])
