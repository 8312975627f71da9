"""What answers have used, as far as it lies in this process's tiers: told by the catalogue, since the API's processes know."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import select

from serving.usage import FLUSH_SECONDS
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow
from storage.catalogue.usage import used_since
from storage.policy.rules import Policy
from storage.tier_control import TierControl

BACK_SECONDS = 120.0  # how far behind a use may be written down, and other machines' clocks be
BATCH = 500


class Uses:
    """One thread calls it. The catalogue tells which documents were used, not which of their chunks: all that lie here count."""

    def __init__(self, catalogue: Catalogue, tiers: TierControl, clock: Callable[[], float] = time.time) -> None:
        self._catalogue, self._tiers, self._clock = catalogue, tiers, clock
        self._seen: dict[str, float] = {}
        self._next = 0.0  # of a clock that nobody sets

    def new(self, policy: Policy) -> dict[str, str]:
        """Keys that were used since this was last asked → their documents; none while no rule is about use."""
        if not policy.speaks_of("keep") or time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + FLUSH_SECONDS
        with self._catalogue.read() as session:
            found = used_since(session, self._clock() - BACK_SECONDS)
        fresh = [document_id for document_id, at in found.items() if self._seen.get(document_id) != at]
        self._seen = found
        return self._lying_here(fresh) if fresh else {}

    def _lying_here(self, documents: list[str]) -> dict[str, str]:
        here = {key for tier in self._tiers.tiers for key in self._tiers.held(tier)}
        found: dict[str, str] = {}
        for at in range(0, len(documents), BATCH):
            query = select(ChunkRow.kv_key, ChunkRow.document_id).where(ChunkRow.document_id.in_(documents[at : at + BATCH]))
            with self._catalogue.read() as session:
                found.update((key, document_id) for key, document_id in session.execute(query) if key in here)
        return found
