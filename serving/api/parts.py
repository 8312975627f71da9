"""What the API is made of. `serving.parts` fills it in for a process, tests with small real parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ingest.deletes import Deleter
from ingest.sources.types import Reach
from ingest.sync import DoneHash
from retrieval.known import KnownText
from retrieval.reranker import Reranker
from retrieval.search import Retriever
from serving.engine.types import Engine
from serving.limits import Limiter
from serving.login import Login
from serving.placement import Placement
from serving.settings import Settings
from serving.usage import Meter
from storage.catalogue.engine import Catalogue
from storage.kvstore import KVStore
from storage.types import ObjectStore, TextEmbedder

if TYPE_CHECKING:
    from serving.parent_site import ParentSite


def _well() -> None:
    """The probe of a part that cannot be away."""


@dataclass(frozen=True)
class ApiParts:
    """One per process. `ring(queue)` wakes a queue's workers; a lost ring costs time only.
    `check_broker` and `check_engine` raise when that part does not answer."""

    settings: Settings
    catalogue: Catalogue
    objects: ObjectStore
    kv_store: KVStore
    deleter: Deleter
    retriever: Retriever
    embedder: TextEmbedder
    engine: Engine
    done_hash: DoneHash
    ring: Callable[[str], None]
    secret: bytes
    placement: Placement
    meter: Meter
    reach: Reach = field(default_factory=Reach)
    login: Login | None = None
    limiter: Limiter = field(default_factory=Limiter)
    clock: Callable[[], float] = time.time
    check_broker: Callable[[], None] = _well
    check_engine: Callable[[], None] = _well
    parent: ParentSite | None = None
    reranker: Reranker | None = None
    known: KnownText | None = None  # None: the model is not blended
