"""Making a corpus like a manifest: what is new, changed, moved and gone, and the one job that sees to it.

A document's identity is its path; its hash decides whether there is work. What only moved keeps its chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.attach import attach
from ingest.attaching import BATCH, attach_for_request, items_of
from ingest.expand import without_members
from ingest.jobs import ACTIVE, JobItem, asked_by, create_job, settle
from ingest.languages import suffix_of
from ingest.plans import lease_plan
from ingest.sources import Entry
from storage.access import is_open
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, Document, File, Job, JobFile
from storage.errors import PathClosed, UserError

MOST_RECORDED = 1000  # paths of each kind
# The hash that a document at this path with this content has when it is done.
DoneHash = Callable[[str, str, str], str]


@dataclass(frozen=True)
class Diff:
    """Paths by what is to happen to them; `renamed` holds (from, to)."""

    added: tuple[str, ...]
    modified: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    deleted: tuple[str, ...]
    unchanged_count: int

    def shown(self) -> dict[str, Any]:
        return {
            "added": list(self.added),
            "modified": list(self.modified),
            "renamed": [{"from": old, "to": new} for old, new in self.renamed],
            "deleted": list(self.deleted),
            "unchanged_count": self.unchanged_count,
        }

    def recorded(self) -> dict[str, Any]:
        """The same as a job keeps it: some of the paths. Its row is read many times, and its files are rows."""
        return {name: some[:MOST_RECORDED] if isinstance(some, list) else some for name, some in self.shown().items()}


def diff(
    session: Session,
    corpus: Corpus,
    manifest: Sequence[Entry],
    *,
    delete_missing: bool,
    done_hash: DoneHash,
    unread: Sequence[str] = (),
    names: Collection[str] | None = None,
) -> Diff:
    """Compare a manifest with the corpus. Files and folders in `unread` are there but could not be read: they, and all
    below them, are left alone. `names`: as of `attach`; documents that the asker may not see are left alone too.

    Raises UserError if a path appears twice, PathClosed for that of a document that the asker may not see."""
    wanted = {entry.path: entry for entry in manifest}
    if len(wanted) < len(manifest):
        raise UserError("a path appears twice in the manifest")
    held = _documents(session, corpus.id)
    for path in wanted:
        if path in held and not is_open(held[path].access, names):
            raise PathClosed(path)
    held = {path: document for path, document in held.items() if is_open(document.access, names)}

    def is_done(document: Document, sha256: str) -> bool:
        """Whether the document holds this content, cut and embedded as we do it now."""
        expected = done_hash(sha256, document.path, corpus.conditioning)
        return document.sha256 == sha256 and document.done_hash == expected

    changed = [p for p, e in wanted.items() if p in held and not is_done(held[p], e.sha256)]
    left_alone = frozenset(unread)
    missing = [path for path in held if path not in wanted and not _is_within(path, left_alone)]
    gone = missing if delete_missing else []
    kept = [held[p] for p in gone if is_done(held[p], held[p].sha256)]
    renamed = _renames([wanted[p] for p in wanted if p not in held], kept)
    sources, targets = {old for old, _ in renamed}, {new for _, new in renamed}
    return Diff(
        added=tuple(p for p in wanted if p not in held and p not in targets),
        modified=tuple(changed),
        renamed=tuple(renamed),
        deleted=tuple(p for p in gone if p not in sources),
        unchanged_count=sum(p in held for p in wanted) - len(changed),
    )


def _documents(session: Session, corpus_id: str) -> dict[str, Document]:
    rows = session.scalars(select(Document).where(Document.corpus_id == corpus_id).order_by(Document.path)).all()
    return {row.path: row for row in without_members(rows)}


def _is_within(path: str, folders: Collection[str]) -> bool:
    """Whether the path, or a folder that it is in, is among these."""
    return path in folders or any(path[:end] in folders for end, sign in enumerate(path) if sign == "/")


def _renames(new: Sequence[Entry], gone: Sequence[Document]) -> list[tuple[str, str]]:
    """Pairs of a path that went and one that came with the same content and kind of file."""
    by_content: dict[tuple[str, str], list[str]] = defaultdict(list)
    for document in reversed(gone):
        by_content[document.sha256, suffix_of(document.path)].append(document.path)
    pairs = []
    for entry in new:
        if paths := by_content.get((entry.sha256, suffix_of(entry.path))):
            pairs.append((paths.pop(), entry.path))
    return pairs


def moves(session: Session, corpus_id: str, found: Diff) -> list[JobItem]:
    """The renames and deletions as items of a job."""
    held = _documents(session, corpus_id)
    renames = [
        JobItem(new, held[old].id, held[old].file_id, "rename") for old, new in found.renamed if old in held
    ]
    deletes = [
        JobItem(path, held[path].id, held[path].file_id, "delete") for path in found.deleted if path in held
    ]
    return renames + deletes


def sync_manifest(
    catalogue: Catalogue,
    find: Callable[[Session], Corpus],
    manifest: Sequence[Entry],
    *,
    delete_missing: bool,
    done_hash: DoneHash,
    dry_run: bool = False,
    names: Collection[str] = (),
) -> dict[str, Any]:
    """The diff for the corpus that `find` gives, in the name of who is known by `names`, with the id of the job that carries
    it out (None for a dry run). Contents that the corpus does not hold yet are waited for: see `offer`. What `find` writes is
    in the transaction that makes the job. Raises UserError, PathClosed, and what `find` raises."""
    with catalogue.write() as session:
        corpus = find(session)
        found = diff(session, corpus, manifest, delete_missing=delete_missing, done_hash=done_hash, names=names)
        if dry_run:
            return {**found.shown(), "job_id": None}
        sha_of = {entry.path: entry.sha256 for entry in manifest}
        known = _known_files(session, corpus.id, names)
        wanted = (*found.modified, *found.added)
        placed = [(path, known[sha_of[path]]) for path in wanted if sha_of[path] in known]
        items = moves(session, corpus.id, found)
        items += [JobItem(path, None, sha256=sha_of[path]) for path in wanted if sha_of[path] not in known]
        planned = len(placed) <= BATCH
        job = create_job(
            session,
            tenant_id=corpus.tenant_id,
            corpus_id=corpus.id,
            type="sync",
            items=items + (items_of(session, corpus, placed, names) if planned else []),
            request={"delete_missing": delete_missing, "manifest": True, **asked_by(names)},
            planned=planned,
        )
        job.result = {"sync": found.recorded()}
        if not planned:
            lease_plan(job)
    if not planned:
        attach_for_request(catalogue, job, placed, names)
    return {**found.shown(), "job_id": job.id}


def _known_files(session: Session, corpus_id: str, names: Collection[str]) -> dict[str, File]:
    """Files by hash that are in this corpus already, in documents open to the asker: whoever knows a hash need not know
    what has it."""
    query = (
        select(File, Document.access)
        .join(Document, Document.file_id == File.id)
        .where(Document.corpus_id == corpus_id)
    )
    return {file.sha256: file for file, access in session.execute(query) if is_open(access, names)}


def offer(session: Session, file: File) -> set[str]:
    """Give an uploaded file to the syncs that wait for its content; the jobs that can go on."""
    # By the hash alone, which is in few rows: a database might rather look through all that its tenant waits for.
    waiting = select(JobFile).where(JobFile.sha256 == file.sha256, JobFile.file_id.is_(None)).order_by(JobFile.job_id, JobFile.id)
    jobs = set()
    for row in session.scalars(waiting).all():
        job = session.get_one(Job, row.job_id)
        if row.status != "pending" or job.status not in ACTIVE or job.tenant_id != file.tenant_id:
            continue
        corpus = session.get(Corpus, job.corpus_id)
        if corpus is None:
            continue
        try:
            names = job.request.get("names")
            row.document_id = attach(session, corpus, row.path, file.id, file.sha256, names=names).id
            row.file_id = file.id
        except PathClosed as error:  # closed since the sync began
            row.status, row.error_code, row.error_message = "failed", "invalid_file", str(error)
            session.flush()
            settle(session, job.id)
        jobs.add(job.id)
    session.flush()
    return jobs


def queue_sync(session: Session, corpus: Corpus, request: Mapping[str, Any] | None = None) -> Job:
    """A job that makes the corpus like its source; a worker finds out what that means. Raises UserError."""
    if corpus.source is None:
        raise UserError("this corpus has no source: name one (preread sync --source FOLDER), or upload files")
    return create_job(
        session,
        tenant_id=corpus.tenant_id,
        corpus_id=corpus.id,
        type="sync",
        request={"delete_missing": True, **(request or {})},
        planned=False,
    )


def running_syncs(session: Session, corpus_id: str) -> list[Job]:
    """The corpus's syncs that have not ended and will change something, the oldest first."""
    active = select(Job).where(Job.corpus_id == corpus_id, Job.type == "sync", Job.status.in_(ACTIVE))
    return [job for job in session.scalars(active.order_by(Job.created_at, Job.id)) if not job.request.get("dry_run")]
