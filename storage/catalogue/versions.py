"""The one rule of what was current at a time: shared by who writes kept generations and who searches them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import Session

from storage.catalogue.schema import Corpus, Document, DocumentVersion
from storage.errors import UserError


def past_of(corpus_id: str) -> str:
    """The partition of both indexes that holds a corpus's kept generations: a search as of now never meets them."""
    return f"{corpus_id}@past"


def current_then(as_of: float) -> ColumnElement[bool]:
    """Of the documents as they are: those that were the same already."""
    return Document.current_since <= as_of


def kept_then(as_of: float) -> ColumnElement[bool]:
    """Of the kept generations: those that were current."""
    return and_(DocumentVersion.valid_from <= as_of, DocumentVersion.valid_to > as_of)


def check_kept(session: Session, corpus_ids: Sequence[str], as_of: float) -> None:
    """Raises UserError where a corpus cannot say what it held then: half an answer would pass for a whole one."""
    rows = session.execute(select(Corpus.name, Corpus.versions_from).where(Corpus.id.in_(corpus_ids)))
    for name, since in rows:
        if since is None:
            message = f"the vector store {name!r} keeps no versions: set keep_versions in its settings"
            raise UserError(message, code="version_not_kept")
        if as_of < since:
            message = f"the vector store {name!r} can be queried as of {since:.3f} (seconds since the epoch) and later"
            raise UserError(message, code="version_not_kept")
