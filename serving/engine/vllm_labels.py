"""KV of the labels before passages, as the torch engine has it from `Reader.label_kv`: vLLM reads them once for an installation,
and it is stored like a chunk's, so that plans can name it.

Their rows belong to no tenant and no chunk. Should an object be lost, its row goes with the attempt to repair it, and it is made
again when vLLM is next looked for. Until labels are known, prompts compute theirs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy import func, select

from precompute.spec import ReaderSpec
from serving.connector.plan import Span, token_hash
from serving.engine.vllm_client import Served, VLLMClient
from serving.engine.vllm_saved import STORED_S, Shelf, saving_body, told_of
from storage.catalogue.engine import Catalogue
from storage.catalogue.insert import insert_into
from storage.catalogue.schema import KVObject
from storage.errors import PrereadError
from storage.keys import group_secret, kv_key
from storage.types import KVProfile

log = logging.getLogger(__name__)
GROUP = "labels"
CODEC = "raw"  # they are small, and of every prompt
AGAIN_S = 60.0  # after which it is tried again if they could not be stored: to read them is a long prompt


@dataclass(frozen=True)
class Label:
    """Tokens `ids` with KV under `key`; read at position `start` of the labels' own prompt."""

    ids: tuple[int, ...]
    key: str
    start: int

    def span(self, start: int) -> Span:
        return Span(start, len(self.ids), self.key, token_hash(self.ids), kind="label", codec=CODEC)


class Labels:
    """`known`: the first labels, in their order, as far as their KV is stored."""

    def __init__(self, reader: ReaderSpec, catalogue: Catalogue, shelf: Shelf, *, secret: bytes) -> None:
        self._reader, self._catalogue, self._shelf, self._secret = reader, catalogue, shelf, secret
        self.known: tuple[Label, ...] = ()
        self._not_before = 0.0

    @cached_property
    def _prompt(self) -> tuple[list[int], list[Label]]:
        reader, secret = self._reader, group_secret(self._secret, GROUP)
        ids, spans = reader.label_prompt(reader.max_positions)
        # What was read before a label is part of its key, as of a chunk's.
        keys = [kv_key(self.profile, ids[start:end], GROUP, secret, [ids[:start]]) for start, end in spans]
        return ids, [Label(tuple(ids[start:end]), key, start) for (start, end), key in zip(spans, keys, strict=True)]

    @cached_property
    def profile(self) -> KVProfile:
        return self._reader.stored_as(CODEC)

    async def make(self, client: VLLMClient, served: Served) -> None:
        """Have stored what is not, if that has not failed just now."""
        if time.monotonic() < self._not_before:
            return
        try:
            await self._make(client, served)
        except Exception as error:  # noqa: BLE001 - a database's driver raises its own, and answers go on without labels
            self._not_before = time.monotonic() + AGAIN_S
            log.warning("labels have no stored KV: %s", error if isinstance(error, PrereadError) else type(error).__name__)

    async def _make(self, client: VLLMClient, served: Served) -> None:
        ids, labels = await asyncio.to_thread(lambda: self._prompt)
        most = min(len(ids), (served.max_model_len or len(ids) + 1) - 1)
        labels = [label for label in labels if label.start + len(label.ids) <= most]
        if not labels:
            return
        if not await asyncio.to_thread(self._are_stored, labels):
            self.known = ()
            saves = [label.span(label.start) for label in labels]
            body = saving_body(self._reader, served.name, ids[: saves[-1].end], saves, GROUP, self._secret)
            told = told_of(await client.complete(body))
            if told.refused:
                raise PrereadError(told.refused)
            await asyncio.to_thread(self._note, labels)
        self.known = tuple(labels)

    def _are_stored(self, labels: Sequence[Label]) -> bool:
        done = select(func.count()).where(KVObject.key.in_([label.key for label in labels]), KVObject.status == "done")
        with self._catalogue.read() as session:
            return session.scalar(done) == len(labels)

    def _note(self, labels: Sequence[Label]) -> None:
        end, rows = time.monotonic() + STORED_S, []
        for label in labels:
            written = self._shelf.await_object(label.key, self.profile, label.ids, end)
            if not isinstance(written, int):
                raise PrereadError(f"an object of theirs was not stored ({written})")
            rows.append({"key": label.key, "tokens": len(label.ids), "bytes": written, "created_at": time.time()})
        shared = {"tenant_id": "", "sharing_group": GROUP, "status": "done", "attempt": 0}
        with self._catalogue.write() as session:
            session.execute(insert_into(session, KVObject).values([row | shared for row in rows]).on_conflict_do_nothing())
