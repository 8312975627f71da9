"""Files attached to a corpus: the document at a path, and who may see it."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.jobs import new_id
from storage.access import is_open, ruled
from storage.catalogue.schema import Corpus, Document
from storage.errors import PathClosed

SEPARATOR = "!/"  # between the path of an archive and that of a file in it


def attach(
    session: Session,
    corpus: Corpus,
    path: str,
    file_id: str,
    sha256: str,
    *,
    attributes: dict[str, Any] | None = None,
    access: list[Any] | None = None,
    names: Collection[str] | None = None,
) -> Document:
    """The document at `path` of the corpus, made if there is none. Rights and attributes apply at once,
    its new content
    when a job has stored it; until then the old content answers, under its own file id.

    `names`: what access lists know the asker by; None: the service itself. Raises PathClosed where there is a document that
    the asker may not see: they would replace it, or open its old content."""
    document = session.scalars(
        select(Document).where(Document.corpus_id == corpus.id, Document.path == path).with_for_update()
    ).first()
    if document is None:
        document = Document(
            id=new_id("doc"),
            corpus_id=corpus.id,
            tenant_id=corpus.tenant_id,
            file_id=file_id,
            path=path,
            sha256=sha256,
            generation=0,
            status="in_progress",
            attributes={},
            created_at=time.time(),
        )
        session.add(document)
    elif not is_open(document.access, names):
        raise PathClosed(path)
    if attributes is not None:
        document.attributes = attributes
    listed = ruled(corpus.settings, path, document.access if access is None else access)
    if listed != document.access:
        document.access = listed
        _pass_on(session, corpus, document, names)
    document.status, document.error_code, document.error_message = "in_progress", None, None
    corpus.last_active_at = time.time()
    session.flush()
    return document


def apply_access_rules(session: Session, corpus: Corpus) -> int:
    """Give the documents that are there the lists that the corpus's rules say. Those that no rule fits keep theirs: a rule
    that is taken away opens nothing. A rule of an archive is that of the files in it, unless one fits these. Returns how many
    have changed."""
    documents = session.scalars(select(Document).where(Document.corpus_id == corpus.id)).all()
    paths, changed = {document.path for document in documents}, 0
    for document in documents:
        listed, archive = document.access, document.path.partition(SEPARATOR)[0]
        if archive != document.path and archive in paths:
            listed = ruled(corpus.settings, archive, listed)
        listed = ruled(corpus.settings, document.path, listed)
        changed += listed != document.access
        document.access = listed
    return changed


def _pass_on(session: Session, corpus: Corpus, archive: Document, names: Collection[str] | None) -> None:
    """The rights of an archive are those of the files in it, but for those that its asker may not see."""
    prefix = archive.path + SEPARATOR
    inside = func.substr(Document.path, 1, len(prefix)) == prefix
    for member in session.scalars(select(Document).where(Document.corpus_id == archive.corpus_id, inside)):
        if is_open(member.access, names):
            member.access = ruled(corpus.settings, member.path, archive.access)
