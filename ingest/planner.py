"""Plans a source's sync in a worker: lists the source, reads what changed, and stores it with the job's
files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.attaching import attach_all
from ingest.encoding import is_storable, storable
from ingest.files import SOURCE_PURPOSE, drop_source_files, store_file
from ingest.jobs import add_items, advance, settle
from ingest.leases import LeaseLost
from ingest.plans import forget_plan, owned_plan
from ingest.sources import Asker, Entry, Left, Reach, Seen, Source, open_source
from ingest.sync import Diff, DoneHash, diff, moves
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, File, Job, JobFile, SourceItem
from storage.errors import Cancelled, FileError, Stopping, UserError
from storage.types import ObjectStore

BATCH = 500
MOST_SHOWN = 1000  # skipped files that a job names


@dataclass(frozen=True)
class SourcePlanner:
    """Finds out the files of a leased sync job. `reach`: what corpora may be synced from."""

    catalogue: Catalogue
    objects: ObjectStore
    reach: Reach
    done_hash: DoneHash
    stopping: Callable[[], bool] = lambda: False  # whether this process has been told to end

    def plan(self, job: Job) -> None:
        """Store the job's files with it. Raises UserError, StorageUnavailable, Cancelled."""
        with self.catalogue.write() as session:
            owned_plan(session, job)
            forget_plan(session, job.id)  # of a worker that died on it
        with self.catalogue.read() as session:
            corpus = session.get(Corpus, job.corpus_id)
            seen = seen_in(session, job.corpus_id)
        if corpus is None:
            raise UserError("the corpus was deleted")
        source = open_source(corpus.source or {}, self.reach, Asker(corpus.tenant_id, seen, check=lambda: self._check(job)))
        try:
            self._plan(job, corpus, source)
        finally:
            source.close()

    def _plan(self, job: Job, corpus: Corpus, source: Source) -> None:
        manifest = _nameable(source)
        with self.catalogue.read() as session:
            found = diff(
                session,
                corpus,
                manifest,
                delete_missing=bool(job.request.get("delete_missing", True)),
                done_hash=self.done_hash,
                unread=[left.path for left in source.skipped if left.unread],
            )
        if found.deleted and not manifest:
            # A disk that is not mounted, a bucket under another name: far likelier than that everything was deleted.
            raise UserError(
                "the source lists no file at all; nothing was deleted. To empty the corpus, sync it with an empty manifest"
            )
        wanted = () if job.request.get("dry_run") else (*found.modified, *found.added)
        stored: dict[str, File] = {}
        try:
            refused = self._store(job, corpus, source, wanted, stored)
            attach_all(self.catalogue, job, list(stored.items()))
            with self.catalogue.write() as session:
                self._finish(session, job, found, refused, source.skipped)
                remember(session, corpus.id, source.seen)
        except Cancelled as error:
            if not isinstance(error, LeaseLost):  # then they are for whoever plans the job now
                drop_source_files(self.catalogue, self.objects, corpus.tenant_id, [file.id for file in stored.values()])
            raise

    def _store(
        self, job: Job, corpus: Corpus, source: Source, paths: Sequence[str], stored: dict[str, File]
    ) -> dict[str, FileError]:
        """Store the contents of these paths; what could not be read, and why."""
        refused: dict[str, FileError] = {}
        for path in paths:
            self._check(job)
            try:
                data = source.read(path)
                stored[path] = store_file(self.catalogue, self.objects, corpus.tenant_id, path, data, SOURCE_PURPOSE)
            except FileError as error:  # QuotaExceeded is one
                refused[path] = error
        return refused

    def _check(self, job: Job) -> None:
        if self.stopping():
            raise Stopping
        with self.catalogue.read() as session:
            status = session.scalar(select(Job.status).where(Job.id == job.id))
        if status != "in_progress":
            raise Cancelled("the job was cancelled")

    def _finish(
        self,
        session: Session,
        job: Job,
        found: Diff,
        refused: Mapping[str, FileError],
        skipped: Sequence[Left],
    ) -> None:
        """Add what else there is, and let workers have the job."""
        row = owned_plan(session, job)
        corpus = session.get(Corpus, job.corpus_id)
        if corpus is None:
            raise UserError("the corpus was deleted")
        dry = bool(job.request.get("dry_run"))
        add_items(session, row, [] if dry else moves(session, corpus.id, found))
        session.add_all(_refusal(job, path, error) for path, error in refused.items())
        shown = [{"path": storable(left.path), "reason": left.reason} for left in skipped[:MOST_SHOWN]]
        row.result = {**row.result, "sync": {**found.recorded(), "dry_run": dry, "skipped": shown}}
        row.lease_owner = row.lease_expires = None
        advance(session, row.id, "extract")
        session.flush()
        settle(session, row.id)


def seen_in(session: Session, corpus_id: str | None) -> dict[str, Seen]:
    """What the corpus's source held when it was last listed, by path."""
    rows = session.scalars(select(SourceItem).where(SourceItem.corpus_id == corpus_id))
    return {row.path: Seen(row.tag, row.sha256, row.bytes, row.refusal) for row in rows}


def remember(session: Session, corpus_id: str, seen: Mapping[str, Seen]) -> None:
    """Make the memory of the source equal to what was seen of it now; rows that say the same are left alone."""
    known = seen_in(session, corpus_id)
    changed = [path for path in {**known, **seen} if known.get(path) != seen.get(path)]
    for paths in (changed[at : at + BATCH] for at in range(0, len(changed), BATCH)):
        session.execute(delete(SourceItem).where(SourceItem.corpus_id == corpus_id, SourceItem.path.in_(paths)))
        session.add_all(SourceItem(corpus_id=corpus_id, path=path, **vars(seen[path])) for path in paths if path in seen)
        session.flush()


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


def _nameable(source: Source) -> list[Entry]:
    """The source's manifest, without the names that are text in no encoding: they can be neither stored nor asked for."""
    manifest = source.manifest()
    odd = [entry.path for entry in manifest if not is_storable(entry.path)]
    source.skipped += [Left(path, "its name is not text") for path in odd]
    return [entry for entry in manifest if entry.path not in set(odd)]
