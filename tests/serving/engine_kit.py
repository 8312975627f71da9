"""A real engine over a tiny model and an object store, with three chunks stored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from fixtures_models import retrieved

from precompute.reader import Reader
from serving.engine.torch_engine import TorchEngine, TorchGeneration
from serving.engine.types import GenerateRequest, Message, Outcome
from storage.folder import FolderStore
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.types import KVRecord, RetrievedChunk

LENGTHS = (30, 45, 60)


class SlowStore(FolderStore):
    """A folder whose reads wait for `gate`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        self.gate.wait(20)
        return super().read_into(name, buffer, offset)


def chunk(number: int, ids: tuple[int, ...], key: str | None = None) -> RetrievedChunk:
    """A chunk of a document in which each token stands for ten characters."""
    return replace(retrieved(number, ids, key), start=1000 * number, end=1000 * number + 10 * len(ids))


class EngineSite:
    """An engine over a folder, or over `objects`, with three chunks stored. Patient: the machine may be busy.

    `tiers`: options of the KVStore."""

    def __init__(
        self, reader: Reader, root: Path, patience_s: float | None = 1.0,
        objects: Any = None, tiers: Mapping[str, Any] = MappingProxyType({}), **settings: Any,
    ) -> None:  # fmt: skip
        self.reader, self.root = reader, root
        self.objects = objects or SlowStore(root)
        self.kv = KVStore(self.objects, **tiers)
        self.engine = TorchEngine(reader, self.kv, patience_s=patience_s, **settings)
        generator = torch.Generator().manual_seed(5)
        ids = [tuple(torch.randint(10, 400, (n,), generator=generator).tolist()) for n in LENGTHS]
        self.chunks: tuple[RetrievedChunk, ...] = tuple(chunk(n, i) for n, i in enumerate(ids))
        if reader.full_prefill_reason is None:
            self.store(ids)

    def store(self, ids: Sequence[tuple[int, ...]]) -> None:
        profile, store = self.reader.profile, KVStore(self.objects)
        keys = [kv_key(profile, i, "g", b"s") for i in ids]
        for key, tokens, kv in zip(keys, ids, self.reader.compile(ids), strict=True):
            store.put(KVRecord(key, profile, tokens, kv))
        self.chunks = tuple(chunk(n, i, key) for n, (i, key) in enumerate(zip(ids, keys, strict=True)))

    def path(self, number: int) -> Path:
        [path] = self.root.rglob(str(self.chunks[number].kv_key))
        return path

    def request(self, question: str = "How much is a ticket?", **changes: Any) -> GenerateRequest:
        made = GenerateRequest((Message("user", question),), self.chunks, method="reuse", max_tokens=16)
        return replace(made, **changes)

    def answers(self, *requests: GenerateRequest) -> list[Outcome]:
        """The outcomes of requests made at once; the deltas of each join to its text."""

        async def all_of_them() -> list[Outcome]:
            return list(await asyncio.gather(*(drain(self.engine.submit(r)) for r in requests)))

        return asyncio.run(all_of_them())

    def answer(self, **changes: Any) -> Outcome:
        return self.answers(self.request(**changes))[0]


async def drain(generation: TorchGeneration) -> Outcome:
    pieces = [delta.text async for delta in generation]
    assert generation.outcome is not None
    assert all(pieces)
    assert "".join(pieces) == generation.outcome.text
    return generation.outcome
