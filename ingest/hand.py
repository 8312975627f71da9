"""The files that a worker has in hand: read, and on their way to their vectors, their members or their new index.

Of small ones there are many, so that they make full batches together; a worker that dies is blamed on all of them, and each
is tried again alone. What takes long (an archive, a text that is very long, a reindex) stands beside them and keeps nobody
else's files waiting: a tenant has two of these in hand at most, of which the second waits if both are texts.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from typing import Any

from ingest.run import FileRun

IN_HAND = 32  # small files that wait for their vectors, at most
TEXT_IN_HAND = 1 << 20  # characters of them, about; a text of more is a long one
SLOW_IN_HAND = 4  # files that take long, at most: two of each tenant


class Hand:
    def __init__(self) -> None:
        self._runs: list[FileRun] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    def take(self, run: FileRun) -> None:
        self._runs.append(run)

    def has_room_for(self, run: FileRun | None) -> bool:
        if run is None or run.ended or _is_slow(run):
            return True
        small = [each.size for each in self._runs if not _is_slow(each)]
        return len(small) < IN_HAND and sum(small) <= TEXT_IN_HAND

    @property
    def may_have_another(self) -> bool:
        """Whether to claim one more. A file that failed before is alone among the small ones: it may have killed its worker."""
        slow = [run for run in self._runs if _is_slow(run)]
        return len(slow) < SLOW_IN_HAND and not any(run.alone for run in self._runs if run not in slow)

    @property
    def busy(self) -> set[str]:
        """Tenants that are to have no other file in hand now."""
        slow = Counter(run.tenant_id for run in self._runs if _is_slow(run))
        return {tenant for tenant, count in slow.items() if count > 1}

    @property
    def is_shared(self) -> bool:
        """Whether a file that failed before is to wait. Beside what takes long it need not: that is blamed at most once for a
        worker's death, since it is alone itself from then on."""
        return any(run.alone or not _is_slow(run) for run in self._runs)

    @property
    def is_slow(self) -> bool:
        return any(map(_is_slow, self._runs))

    def go_on(self) -> int:
        """Do the next part of each file that waits for nothing; how many files have ended."""
        for run in self._due():
            run.go_on()
        before = len(self._runs)
        self._runs = [run for run in self._runs if not run.ended]
        return before - len(self._runs)

    @property
    def waits_for(self) -> list[Future[Any]] | None:
        """What has to be done before any file can go on; None if one can now."""
        if self._due():
            return None
        return [ready for run in self._runs if (ready := run.waits_for) is not None]

    def _due(self) -> list[FileRun]:
        """Those that can go on. A tenant's long texts do so one after the other: each is in memory many times over."""
        due, long_texts = [], set()
        for run in self._runs:
            is_long = run.size > TEXT_IN_HAND
            if run.waits_for is None and not (is_long and run.tenant_id in long_texts):
                due.append(run)
            if is_long:
                long_texts.add(run.tenant_id)
        return due

    def look(self) -> None:
        """End those whose job is cancelled, or whose lease is lost."""
        for run in self._runs:
            run.look()

    def leave(self) -> None:
        """Give them up: another worker may have them at once."""
        for run in self._runs:
            run.leave()


def _is_slow(run: FileRun) -> bool:
    return run.slow or run.size > TEXT_IN_HAND
