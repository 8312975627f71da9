"""What of a job one may know: the paths of documents that are not open to one are left out, and what is counted stays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.access import is_open, ruled
from storage.catalogue.schema import Corpus, Document

BATCH = 500
HIDDEN = "a document that is not open to you"


def closed_paths(session: Session, corpus_id: str | None, paths: Collection[str], names: Collection[str]) -> set[str]:
    """Those of the paths whose documents are not open to `names`; where there is none, the corpus's rules say."""
    corpus = session.get(Corpus, corpus_id) if corpus_id else None
    settings = corpus.settings if corpus else {}
    lists: dict[str, Sequence[str] | None] = {path: ruled(settings, path, None) for path in paths}
    ordered = list(lists)
    for some in (ordered[at : at + BATCH] for at in range(0, len(ordered), BATCH)):
        query = select(Document.path, Document.access).where(Document.corpus_id == corpus_id, Document.path.in_(some))
        lists.update((path, access) for path, access in session.execute(query))
    return {path for path, access in lists.items() if not is_open(access, names)}


def shown_to(
    session: Session, corpus_id: str | None, said: Sequence[dict[str, Any]], names: Collection[str]
) -> list[dict[str, Any]]:
    """A job's errors or warnings. Of closed documents they keep the code: neither file, nor path, nor message."""
    closed = closed_paths(session, corpus_id, {each["filename"] for each in said if each["filename"]}, names)
    hidden = {"file_id": None, "filename": None, "message": HIDDEN}
    return [{**each, **hidden} if each["filename"] in closed else each for each in said]


def diff_shown_to(
    session: Session, corpus_id: str, found: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """What a sync has found, without the paths of closed documents."""
    paths = {path for value in found.values() if isinstance(value, list) for each in value for path in _paths(each)}
    closed = closed_paths(session, corpus_id, paths, names)
    return {
        name: [each for each in value if closed.isdisjoint(_paths(each))] if isinstance(value, list) else value
        for name, value in found.items()
    }


def _paths(each: str | Mapping[str, str]) -> list[str]:
    """Of a path, a rename, or something left out."""
    return [each] if isinstance(each, str) else [each[name] for name in ("from", "to", "path") if name in each]
