"""Archives unpacked in threads beside, since one may hold ten thousand files: others are worked on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import copy_context
from typing import BinaryIO

from ingest.expand import Unpacked, drop_unpacked, unpack
from ingest.leases import Hold
from ingest.run import Rest
from storage.catalogue.engine import Catalogue
from storage.errors import Cancelled
from storage.tracing import span
from storage.types import ObjectStore

THREADS = 8  # more than a worker has archives in hand


class Unpacker:
    def __init__(self, catalogue: Catalogue, objects: ObjectStore) -> None:
        self._catalogue, self._objects = catalogue, objects
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="unpack")

    def begin(
        self, tenant_id: str, path: str, archive: BinaryIO, opened: ExitStack, hold: Hold, end: Callable[[Unpacked], None]
    ) -> Rest:
        """Begin to store an archive's files; what is left is to wait for that, and to `end`. `opened` is closed as soon as the
        archive has been read."""
        found, unwanted = Unpacked(), threading.Event()

        def check() -> None:
            hold.check()
            if unwanted.is_set():
                raise Cancelled("the archive is wanted no more")

        def run() -> None:
            with opened, span("ingest.unpack"):
                unpack(self._catalogue, self._objects, tenant_id, path, archive, check, found)

        def finish() -> None:
            unpacked.result()
            end(found)

        def drop() -> None:
            drop_unpacked(self._catalogue, self._objects, tenant_id, found.files.values())

        def undo() -> None:
            unwanted.set()
            wait((unpacked,))
            if hold.cancelled:  # ten thousand files take a while, and nobody waits for their end
                self._threads.submit(drop)
            else:
                drop()

        unpacked = self._threads.submit(copy_context().run, run)
        return Rest(finish, undo, unpacked, slow=True)
