"""The catalogue and the object store, held against each other, both ways."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sqlalchemy import select

from ingest.bases import broken
from ingest.files import raw_name, read_file
from ingest.garbage import PARTS, orphans
from storage.audit import check, stored_profile
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import File, KVObject
from storage.codecs.shelf import BASES, CodecShelf
from storage.errors import ObjectMissing
from storage.tiers.store import object_name
from storage.types import KVProfile, Miss, ObjectInfo, ObjectStore

MOST_SHOWN = 100
PAGE = 500
KINDS = ("rows", "objects", "checked", "missing", "damaged", "wrong_key", "unreadable", "orphans", "repaired")
BROKEN = ("missing", "damaged", "wrong_key", "unreadable")


@dataclass
class Findings:
    """Counts of KINDS for "kv", "raw" and "basis", and the first problems by name. Orphans are no problem: they are collected.
    Objects that are unreadable because their codec's basis is broken are counted; named is the basis."""

    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {"kv": Counter(), "raw": Counter(), "basis": Counter()}
    )
    problems: list[dict[str, str]] = field(default_factory=list)

    def add(self, room: str, problem: str, name: str) -> None:
        self.counts[room][problem] += 1
        if len(self.problems) < MOST_SHOWN:
            self.problems.append({"name": name, "problem": problem})

    @property
    def unrepaired(self) -> int:
        """How many rows stand for something that cannot be read, and are not owed again."""
        return sum(c[p] for c in self.counts.values() for p in BROKEN) - sum(c["repaired"] for c in self.counts.values())

    def shown(self) -> dict[str, Any]:
        """As plain JSON."""
        counted = {room: {kind: counts[kind] for kind in KINDS} for room, counts in self.counts.items()}
        return {**counted, "unrepaired": self.unrepaired, "problems": self.problems}


@dataclass(frozen=True)
class Verifier:
    """Rows whose object is gone, has another size, does not stand its checksums or carries another key; and orphans.

    `sample`: the share of objects whose content is read; bases of codecs are all read, and first. `repair(key)` has a KV object
    computed again, `restore(digest)` a basis made again, and says whether that is the same; files cannot be repaired, only
    named. Nothing is changed without them. Safe while everything else is running: what looks wrong is
    looked at once more, row first, before it counts.
    """

    catalogue: Catalogue
    objects: ObjectStore
    sample: float = 1.0
    repair: Callable[[str], bool] | None = None
    elsewhere: Callable[[Sequence[str]], Collection[str]] = lambda _: ()  # which of some keys a parent site stores
    restore: Callable[[str], bool] | None = None

    def run(self) -> Findings:
        """Raises StorageUnavailable."""
        findings = Findings()
        self._bases(findings)
        files: defaultdict[str, list[File]] = defaultdict(list)
        with self.catalogue.read() as session:
            for file in session.scalars(select(File)):
                files[raw_name(file.tenant_id, file.sha256)[: len("raw/0")]].append(file)
        for part in PARTS:
            stored = {info.name: info for info in self.objects.entries(part)}
            room = part.partition("/")[0]
            findings.counts[room]["objects"] += len(stored)
            findings.counts[room]["orphans"] += len(orphans(self.catalogue, list(stored.values())))
            if room == "kv":
                self._kv(part, stored, findings)
            else:
                self._raw(files[part], stored, findings)
        return findings

    # --- bases of codecs ---

    def _bases(self, findings: Findings) -> None:
        findings.counts["basis"].update(objects=sum(1 for _ in self.objects.list(BASES)))
        for name, problem in broken(self.objects).items():
            findings.add("basis", problem, name)
            if self.restore is not None and name.startswith(BASES) and self.restore(name.removeprefix(BASES)):
                findings.counts["basis"]["repaired"] += 1

    # --- KV ---

    @cached_property
    def _codecs(self) -> CodecShelf:
        return CodecShelf(self.objects)

    def _kv(self, part: str, stored: dict[str, ObjectInfo], findings: Findings) -> None:
        start = part.split("/")[1]
        query = select(KVObject.key, KVObject.bytes).where(KVObject.status == "done", KVObject.key.startswith(start))
        with self.catalogue.read() as session:
            rows = session.execute(query.order_by(KVObject.key)).all()
        absent = [key for key, _ in rows if part + key not in stored]
        there = {key for at in range(0, len(absent), PAGE) for key in self.elsewhere(absent[at : at + PAGE])}
        for key, size in [row for row in rows if row.key not in there]:
            findings.counts["kv"]["rows"] += 1
            problem = self._kv_problem(key, size, stored.get(part + key), findings)
            if problem is None:
                continue
            if problem == "unreadable":
                findings.counts["kv"][problem] += 1
            else:
                findings.add("kv", problem, part + key)
            if self.repair is not None and self.repair(key):
                findings.counts["kv"]["repaired"] += 1

    def _kv_problem(self, key: str, size: int, info: ObjectInfo | None, findings: Findings) -> str | None:
        name = object_name(key)
        problem = None
        if info is None:
            problem = "missing"
        elif info.size != size:
            problem = "damaged"
        elif random.random() < self.sample:
            findings.counts["kv"]["checked"] += 1
            problem = self._judged(name)
        if problem is None or not self._still_done(key):
            return None
        return self._judged(name)  # it may have been written since the store was listed

    def _judged(self, name: str) -> str | None:
        miss = check(self.objects, name, self._codecs)
        if miss is None:
            return None
        profile = stored_profile(self.objects, name)
        if isinstance(profile, KVProfile) and isinstance(self._codecs.find(profile.codec), Miss):
            return "unreadable"  # by itself it may be whole
        return {Miss.ABSENT: "missing", Miss.WRONG_KEY: "wrong_key"}.get(miss, "damaged")

    def _still_done(self, key: str) -> bool:
        with self.catalogue.read() as session:
            return session.scalar(select(KVObject.status).where(KVObject.key == key)) == "done"

    # --- uploaded files ---

    def _raw(self, files: Sequence[File], stored: dict[str, ObjectInfo], findings: Findings) -> None:
        for file in files:
            findings.counts["raw"]["rows"] += 1
            info = stored.get(raw_name(file.tenant_id, file.sha256))
            problem = "missing" if info is None else "damaged" if info.size != file.bytes else None
            if problem is None and random.random() < self.sample:
                findings.counts["raw"]["checked"] += 1
                problem = self._file_problem(file)
            if problem is not None and (problem := self._file_problem(file)) is not None:
                findings.add("raw", problem, file.id)

    def _file_problem(self, file: File) -> str | None:
        try:
            read_file(self.objects, file)
        except ObjectMissing:
            with self.catalogue.read() as session:
                if session.get(File, file.id) is None:
                    return None  # deleted meanwhile
            return "missing" if self.objects.size(raw_name(file.tenant_id, file.sha256)) is None else "damaged"
        return None
