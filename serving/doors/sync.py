"""Making a corpus like a manifest, or like its source; and the source itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete
from sqlalchemy.orm import Session

from ingest.job_view import view
from ingest.rights import diff_shown_to
from ingest.sources import Asker, Entry, open_source
from ingest.sync import queue_sync, sync_manifest
from serving.api.parts import ApiParts
from serving.auth import Principal, audit
from serving.doors import corpora, jobs
from storage.catalogue.schema import Corpus, SourceItem
from storage.errors import NotFound


def from_source(
    parts: ApiParts, who: Principal, corpus_id: str, delete_missing: bool, dry_run: bool
) -> dict[str, Any]:
    """A job that makes the corpus like its source, or says what that would change. Raises NotFound, UserError."""
    with parts.catalogue.write() as session:
        corpus = corpora.find(session, who, corpus_id)
        job = queue_sync(session, corpus, {"delete_missing": delete_missing, "dry_run": dry_run})
        shown = {**view(session, job, who.names), "job_id": job.id}
    parts.ring("ingest")
    return shown


def from_manifest(
    parts: ApiParts,
    who: Principal,
    corpus_id: str,
    manifest: Sequence[Entry],
    delete_missing: bool,
    dry_run: bool,
) -> dict[str, Any]:
    """What the manifest changes, and unless it is a dry run the job that does; contents are uploaded after.

    Raises NotFound, PathClosed, UserError."""


    def find(session: Session) -> Corpus:
        corpus = corpora.find(session, who, corpus_id)
        if not dry_run and delete_missing:
            audit(session, who, "corpus.sync", corpus_id, parts.clock())
        return corpus

    done = sync_manifest(
        parts.catalogue,
        find,
        manifest,
        delete_missing=delete_missing,
        done_hash=parts.done_hash,
        dry_run=dry_run,
        names=who.names,
    )
    if not dry_run:
        parts.ring("ingest")
    return {"object": "corpus.sync", "corpus_id": corpus_id, **done}


def show(parts: ApiParts, who: Principal, corpus_id: str, job_id: str) -> dict[str, Any]:
    """What a sync of the corpus has found to do, once its source is listed; `skipped`: what it left out, and why.
    Without the paths of documents that are not open to the asker.

    Raises NotFound."""
    with parts.catalogue.read() as session:
        corpora.find(session, who, corpus_id)
        job = jobs.find(session, who, job_id)
        if job.corpus_id != corpus_id or job.type != "sync":
            raise NotFound(f"No such sync: {job_id!r}")
        found = job.result.get("sync")
        found = found and diff_shown_to(session, corpus_id, found, who.names)
        return {"object": "corpus.sync", "corpus_id": corpus_id, "job_id": job.id, "status": job.status, "found": found}


def get_source(parts: ApiParts, who: Principal, corpus_id: str) -> dict[str, Any]:
    """Where the corpus is synced from; `source` is None if from nowhere. Raises NotFound."""
    with parts.catalogue.read() as session:
        return _shape(corpora.find(session, who, corpus_id))


def set_source(
    parts: ApiParts, who: Principal, corpus_id: str, source: dict[str, Any] | None
) -> dict[str, Any]:
    """Say where the corpus is synced from. Raises NotFound, or UserError if the server may not read there."""
    if source is not None:
        open_source(source, parts.reach, Asker(who.tenant_id)).close()
    with parts.catalogue.write() as session:
        corpus = corpora.find(session, who, corpus_id)
        if source != corpus.source:  # what another source said of a path says nothing of this one's
            session.execute(delete(SourceItem).where(SourceItem.corpus_id == corpus_id))
        corpus.source = source
        audit(session, who, "corpus.source", corpus_id, parts.clock())
        return _shape(corpus)


def _shape(corpus: Corpus) -> dict[str, Any]:
    return {"object": "corpus.source", "corpus_id": corpus.id, "source": corpus.source}
