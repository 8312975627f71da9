"""A real engine over a real S3 server, with a server in between that misbehaves as told."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from engine_kit import EngineSite
from fixtures_s3 import S3Server
from rude_server import RudeServer

from storage.breaker import Breaker
from storage.retry import Retry
from storage.s3 import S3Store
from storage.s3_errors import is_trouble
from storage.types import Miss

READ_S = 0.5  # without a byte, then S3 has timed out


def until(look: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


def connected(server: S3Server, endpoint: str, bucket: str) -> S3Store:
    return S3Store(
        bucket, endpoint=endpoint, access_key=server.access_key, secret_key=server.secret_key,
        connect_timeout_s=2, read_timeout_s=READ_S,
    )  # fmt: skip


def impatient(store: S3Store, folder: str, attempts: int = 2, threshold: int = 1000, cool_down_s: float = 0.3) -> S3Store:
    """The store below a prefix of its own. Its breaker stays closed, unless the test is about that."""
    made = copy.copy(store)  # with the same client: making one takes boto3 half a second
    made._prefix = f"{folder}/"
    made._retry = Retry(is_trouble, Breaker(threshold, cool_down_s), attempts=attempts)
    return made


class S3Site(EngineSite):
    """An EngineSite whose objects are in S3, reached through `rude`; `behind` reaches them past it."""

    objects: S3Store

    def __init__(self, reader: object, rude: RudeServer, objects: S3Store, behind: S3Store, **settings: object) -> None:
        self.rude, self.behind = rude, behind
        rude.behave()
        super().__init__(reader, Path(), objects=objects, **settings)  # type: ignore[arg-type]

    def name(self, number: int) -> str:
        key = self.chunks[number].kv_key
        assert key is not None
        return f"kv/{key[:2]}/{key}"

    def said_with(self, stored: Collection[int]) -> str:
        """The answer with stored KV of these chunks and no others, over a wire that is well, waited for."""
        self.rude.behave()
        chunks = tuple(c if c.chunk_id in stored else replace(c, kv_key=None) for c in self.chunks)
        rates = self.engine._fetcher._rates
        patience, rates._fixed_s = rates._fixed_s, 20.0
        for _ in range(3):  # a machine that is busy may be as slow as S3
            outcome = self.answer(chunks=chunks)
            if (came := {c.chunk_id for c in outcome.report.reused}) == {*stored}:
                break
        rates._fixed_s = patience
        assert came == {*stored}
        return outcome.text

    def counted(self) -> dict[str, int]:
        return self.kv.counters()

    def asked(self) -> int:
        """How many records the store was asked for: each has ended in a hit or a miss, and was counted once."""
        counts = self.counted()
        return counts["hits"] + sum(counts[f"miss_{miss}"] for miss in Miss)

    def close(self) -> None:
        self.rude.behave()
        self.engine.close()


def readers() -> list[str]:
    """The threads that read for somebody."""
    names = ("kv-reader", "object-reader")
    return [thread.name for thread in threading.enumerate() if thread.name in names]


MakeSite = Callable[..., S3Site]
