"""Plans a source's sync in a worker: lists the source, reads what changed, and stores it with the job's
files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.files import SOURCE_PURPOSE, store_file
from ingest.jobs import JobItem, add_items, advance, attach, settle
from ingest.leases import owned_plan
from ingest.sources import Entry, FolderSource, GitSource, Left
from ingest.sync import Diff, DoneHash, diff, moves
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, File, Job, JobFile
from storage.errors import Cancelled, FileError, UserError
from storage.types import ObjectStore

MOST_SHOWN = 1000  # skipped files that a job names


class Source(Protocol):
    skipped: list[Left]

    def manifest(self) -> list[Entry]: ...

    def read(self, path: str) -> bytes: ...


def open_source(source: Mapping[str, Any], roots: Sequence[str]) -> Source:
    """The source of a corpus. Raises UserError unless it lies, links resolved, under a folder the operator
    allows."""
    kind, path = source.get("type"), source.get("path")
    if kind not in ("folder", "git") or not isinstance(path, str) or not path:
        raise UserError('a source is {"type": "folder" or "git", "path": …}, a git source may name a "ref"')
    real = os.path.realpath(path)
    allowed = [os.path.realpath(root) for root in roots if root]
    if not any(os.path.commonpath([root, real]) == root for root in allowed):
        raise UserError(f"the source {path!r} is not in a folder that this server may read")
    if kind == "folder":
        return FolderSource(real)
    ref = source.get("ref", "HEAD")
    if not isinstance(ref, str):
        raise UserError('the "ref" of a git source is a branch, tag or commit')
    return GitSource(real, ref)


@dataclass(frozen=True)
class SourcePlanner:
    """Finds out the files of a leased sync job. `roots`: the folders from which corpora may be synced."""

    catalogue: Catalogue
    objects: ObjectStore
    roots: Sequence[str]
    done_hash: DoneHash

    def plan(self, job: Job) -> None:
        """Store the job's files with it. Raises UserError, StorageUnavailable, Cancelled."""
        with self.catalogue.read() as session:
            corpus = session.get(Corpus, job.corpus_id)
        if corpus is None:
            raise UserError("the corpus was deleted")
        source = open_source(corpus.source or {}, self.roots)
        manifest = [entry for entry in source.manifest() if _is_unicode(entry.path)]
        with self.catalogue.read() as session:
            found = diff(
                session,
                corpus,
                manifest,
                delete_missing=bool(job.request.get("delete_missing", True)),
                done_hash=self.done_hash,
                unread=[left.path for left in source.skipped if left.reason.startswith("cannot be")],
            )
        stored, refused = self._store(job, corpus, source, (*found.modified, *found.added))
        with self.catalogue.write() as session:
            self._write(session, job, found, stored, refused, source.skipped)

    def _store(
        self, job: Job, corpus: Corpus, source: Source, paths: Sequence[str]
    ) -> tuple[dict[str, File], dict[str, FileError]]:
        """Store the contents of these paths; what could not be read, and why."""
        stored: dict[str, File] = {}
        refused: dict[str, FileError] = {}
        for path in paths:
            self._check(job)
            try:
                data = source.read(path)
                stored[path] = store_file(
                    self.catalogue, self.objects, corpus.tenant_id, path, data, SOURCE_PURPOSE
                )
            except FileError as error:  # QuotaExceeded is one
                refused[path] = error
        return stored, refused

    def _check(self, job: Job) -> None:
        with self.catalogue.read() as session:
            status = session.scalar(select(Job.status).where(Job.id == job.id))
        if status != "in_progress":
            raise Cancelled("the job was cancelled")

    def _write(
        self,
        session: Session,
        job: Job,
        found: Diff,
        stored: Mapping[str, File],
        refused: Mapping[str, FileError],
        skipped: Sequence[Left],
    ) -> None:
        row = owned_plan(session, job)
        corpus = session.get(Corpus, job.corpus_id)
        if corpus is None:
            raise UserError("the corpus was deleted")
        items = moves(session, corpus.id, found)
        for path, file in stored.items():
            items.append(JobItem(path, attach(session, corpus, path, file.id, file.sha256).id, file.id))
        add_items(session, row, items)
        session.add_all(_refusal(job, path, error) for path, error in refused.items())
        shown = [{"path": _printable(left.path), "reason": left.reason} for left in skipped[:MOST_SHOWN]]
        row.result = {**row.result, "sync": {**found.recorded(), "skipped": shown}}
        row.lease_owner = row.lease_expires = None
        advance(session, row.id, "extract")
        session.flush()
        settle(session, row.id)


def _refusal(job: Job, path: str, error: FileError) -> JobFile:
    return JobFile(
        job_id=job.id,
        path=path,
        action="upsert",
        status="failed",
        attempt=0,
        error_code=error.code,
        error_message=str(error),
    )


def _is_unicode(path: str) -> bool:
    """A name that is not text in any encoding we know cannot be stored, nor asked for by anybody."""
    return path == _printable(path)


def _printable(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
