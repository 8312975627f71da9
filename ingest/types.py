"""What ingest is handed by the wiring: small protocols, so that this room knows no index, model or
embedder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from sqlalchemy.orm import Session

from storage.catalogue.schema import Corpus, Document
from storage.policy.types import Decision
from storage.types import Chunk, ParsedDocument

# Removes stored KV objects from every tier; absent ones are no error. The keys that the store would not delete: they stay
# owed. Raises StorageUnavailable.
KVDelete = Callable[[Sequence[str]], Collection[str]]
Cut = Callable[[ParsedDocument], Sequence[Chunk]]
# Tells the workers of a queue ("ingest" or "precompute") that rows wait. A bell that is not heard is rung
# again.
Ring = Callable[[str], None]
# What the operator's policy says of a document in its corpus.
Decide = Callable[[Document, Corpus], Decision]


class Parser(Protocol):
    def parse(self, data: bytes, name: str, check: Callable[[], None]) -> ParsedDocument:
        """Raises FileError, and whatever `check` raises, which is called again and again."""
        ...


class SearchIndex(Protocol):
    """Both indexes of a corpus. All methods take part in the caller's transaction."""

    def add(self, session: Session, corpus_id: str, rows: Sequence[tuple[int, str, Sequence[float]]]) -> None:
        """Make chunks searchable: (chunk id, text, unit vector). Their rows are in the session already."""
        ...

    def remove(self, session: Session, chunk_ids: Sequence[int]) -> None:
        """Make chunks unsearchable, before their rows are deleted."""
        ...

    def copy(self, session: Session, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        """Put what is there under each pair's first id under its second one as well, in another corpus's partition."""
        ...
