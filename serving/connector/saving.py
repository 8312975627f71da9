"""Chunks that vLLM has read, as objects: K freed of its position, all heads, written by a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from serving.connector.director import Save
from serving.connector.plan import Span
from serving.connector.transfer import Pages
from storage.kvstore import KVStore
from storage.types import KVProfile, KVRecord

log = logging.getLogger(__name__)


class Saver:
    """`gather`: a rank's heads [layers, 2, kv_heads, tokens, head_dim] to all heads, on every rank, or None where another rank
    stores them."""

    def __init__(self, store: KVStore, gather: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._store, self._gather = store, gather
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kv-save")
        self._saved: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    @torch.inference_mode()
    def save(self, pages: Pages, save: Save) -> None:
        """Copies the pages at once; what is written is told by `saved` later. Failures are logged: the key stays owed."""
        table = torch.tensor(save.blocks, device=pages.device)
        for span in save.plan.saves:
            positions = torch.arange(span.start, span.end, device=pages.device)
            own = pages.take(positions, table)
            own[:, 0] = pages.rope.unplace(own[:, 0], positions)
            kv = self._gather(own)
            if kv is not None:
                self._threads.submit(self._put, save.request_id, span, save, kv.cpu())

    def saved(self) -> dict[str, list[str]]:
        """Keys by request that were written since this was last asked."""
        with self._lock:
            found, self._saved = self._saved, {}
            return found

    def close(self) -> None:
        """What is copied is written first."""
        self._threads.shutdown(wait=True)

    def _put(self, request_id: str, span: Span, save: Save, kv: torch.Tensor) -> None:
        profile: KVProfile = save.plan.profile_of(span)
        try:
            self._store.put(KVRecord(span.key, profile, save.token_ids[span.start : span.end], kv))
        except Exception:
            log.exception("a compiled chunk could not be stored")
            return
        with self._lock:
            self._saved.setdefault(request_id, []).append(span.key)
