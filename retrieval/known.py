"""Stored chunks whose text people send along: looked up by anchors (`storage.anchors`), within the asker's rights.

What is found here may stand in the text; whoever plans the prompt compares token by token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from retrieval.results import FOUND, retrieved
from retrieval.rules import Rules
from storage.anchors import SHORTEST, candidates
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow, Corpus, Document
from storage.types import RetrievedChunk

ALIKE = 8  # chunks with the same anchor that are looked at: licence headers are many
TOKENS_PER_CHUNK = 12  # no more chunks than one for so many tokens of the text
ROWS = 500  # of one query
# The limit of each anchor comes after the rights, so that chunks that nobody may see crowd out none.
_ALLOWED = "FROM chunk c JOIN document d ON d.id = c.document_id WHERE c.tenant_id = :tenant AND c.{end} = a.value AND {rule}"
_SQLITE = (
    "SELECT DISTINCT f.id FROM json_each(:anchors) a CROSS JOIN chunk f "
    f"ON f.id IN (SELECT c.id {_ALLOWED} LIMIT {ALIKE}) LIMIT :most"
)
_POSTGRES = (
    "SELECT DISTINCT f.id FROM unnest(CAST(:anchors AS bigint[])) a(value) "
    f"CROSS JOIN LATERAL (SELECT c.id {_ALLOWED} LIMIT {ALIKE}) f LIMIT :most"
)


class KnownText:
    """Looks into one catalogue; `encode` is the reader's tokenizer. Threads may share it."""

    def __init__(self, catalogue: Catalogue, encode: Callable[[str], Sequence[int]]) -> None:
        self._catalogue, self._encode = catalogue, encode

    def find(
        self, texts: Iterable[str], *, tenant_id: str, corpora: Collection[str] | None, principals: Collection[str]
    ) -> tuple[RetrievedChunk, ...]:
        """Chunks that may stand in the texts. `corpora`: those the asker is restricted to; None: all of the tenant."""
        encoded = [self._encode(each) for each in dict.fromkeys(texts) if len(each) >= SHORTEST]
        anchors = sorted(set().union(*map(candidates, encoded)))
        if not anchors:
            return ()
        most = 1 + sum(map(len, encoded)) // TOKENS_PER_CHUNK
        with self._catalogue.read() as session:
            owned = session.scalars(select(Corpus.id).where(Corpus.tenant_id == tenant_id)).all()
            readable = tuple(corpus for corpus in owned if corpora is None or corpus in corpora)
            rules = Rules(tenant_id, readable, frozenset(principals))
            # Whole chunks first: many may begin alike, few end alike too.
            ids = dict.fromkeys(chunk for end in ("tail", "head") for chunk in self._ids(session, rules, anchors, end, most))
            rows = [row for some in _parts(list(ids)) for row in session.execute(_rows(some)) if rules.permits(row)]
        return tuple(retrieved(row, 0.0) for row in rows)

    def _ids(self, session: Session, rules: Rules, anchors: Sequence[int], end: str, most: int) -> Sequence[int]:
        sqlite = self._catalogue.dialect == "sqlite"
        rule, values = rules.clause(self._catalogue.dialect)
        named: dict[str, Any] = {"anchors": json.dumps(list(anchors)) if sqlite else list(anchors)}
        sql = (_SQLITE if sqlite else _POSTGRES).format(end=end, rule=rule)
        return session.scalars(text(sql), {**values, **named, "tenant": rules.tenant_id, "most": most}).all()


def _rows(ids: Sequence[int]) -> Any:
    return select(*FOUND).join(Document, Document.id == ChunkRow.document_id).where(ChunkRow.id.in_(ids))


def _parts(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    return (ids[start : start + ROWS] for start in range(0, len(ids), ROWS))
