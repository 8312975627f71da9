"""Deleting documents and corpora, down to the last byte, with a receipt that counts each kind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, delete, func, or_, select, update
from sqlalchemy.orm import Session

from ingest import versions
from ingest.attach import SEPARATOR
from ingest.commit import drop_chunks
from ingest.expand import members
from ingest.files import SOURCE_PURPOSE, delete_file
from ingest.jobs import ACTIVE, WITH_CONTENT, cancel, cancel_waiting, create_job, lock_job, settle
from ingest.purge import release, sweep
from ingest.types import KVDelete, SearchIndex
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import (
    ChunkRow,
    Corpus,
    Document,
    DocumentUse,
    DocumentVersion,
    File,
    Job,
    JobFile,
    KVObject,
    PushDelivery,
    PushHook,
    Schedule,
    ScheduleRun,
    SourceItem,
)
from storage.errors import NotFound, StorageUnavailable
from storage.types import ObjectStore

BATCH = 100  # documents per transaction
Receipt = dict[str, int]
KINDS = (
    "documents",
    "chunks",
    "vectors",
    "lexical",
    "versions",
    "kv_objects",
    "kv_kept",
    "kv_owed",
    "files",
    "files_kept",
)


@dataclass(frozen=True)
class Deleter:
    """Deletes in the tenant's name. `kv_kept` and `files_kept` count what another document still holds;
    `kv_owed` what
    the store could not delete yet and the next ticks will."""

    catalogue: Catalogue
    objects: ObjectStore
    index: SearchIndex
    kv_delete: KVDelete

    def document(self, tenant_id: str, document_id: str, *, raw: bool = True) -> Receipt:
        """Delete one document, and with `raw` its file too. Raises NotFound."""
        with self.catalogue.read() as session:
            document = session.get(Document, document_id)
            if document is None or document.tenant_id != tenant_id:
                raise NotFound(f"no document {document_id!r}")
        return self._documents(tenant_id, [document_id], raw)

    def corpus(self, tenant_id: str, corpus_id: str, *, raw: bool = False) -> Receipt:
        """Delete a corpus with its documents and schedules, and cancel its jobs. Raises NotFound."""
        with self.catalogue.read() as session:
            corpus = session.get(Corpus, corpus_id)
            if corpus is None or corpus.tenant_id != tenant_id:
                raise NotFound(f"no corpus {corpus_id!r}")
        receipt = dict.fromkeys(KINDS, 0)
        while (ids := self._drop_if_empty(corpus_id)) is not None:
            for kind, count in self._documents(tenant_id, ids, raw).items():
                receipt[kind] += count
            for kind, count in self.kept(tenant_id, DocumentVersion.corpus_id == corpus_id, raw=raw).items():
                receipt[kind] += count
        return receipt

    def _drop_if_empty(self, corpus_id: str) -> Sequence[str] | None:
        """End all work on a corpus, and drop it if nothing is in it: None then. Else some of its documents, which may have been
        added while others were deleted."""
        with self.catalogue.write() as session:
            active = select(Job.id).where(Job.corpus_id == corpus_id, Job.status.in_(ACTIVE))
            for job_id in session.scalars(active).all():
                cancel(session, job_id)
            session.get(Corpus, corpus_id, with_for_update=True)  # from here on nobody adds to it
            _drop_schedules(session, corpus_id)
            documents = select(Document.id).where(Document.corpus_id == corpus_id).limit(BATCH)
            ids = session.scalars(documents).all()
            kept = select(DocumentVersion.id).where(DocumentVersion.corpus_id == corpus_id).limit(1)
            if ids or session.scalars(kept).first() is not None:
                return ids
            session.execute(delete(SourceItem).where(SourceItem.corpus_id == corpus_id))
            session.execute(delete(Corpus).where(Corpus.id == corpus_id))
            return None

    def kept(self, tenant_id: str, which: ColumnElement[bool], *, raw: bool = False) -> Receipt:
        """Delete kept generations, whatever their corpus's settings say."""
        receipt = dict.fromkeys(KINDS, 0)
        own = select(DocumentVersion.id).where(DocumentVersion.tenant_id == tenant_id, which).limit(BATCH)
        while True:
            with self.catalogue.write() as session:
                ids = session.scalars(own).all()
                gone = versions.forget(session, self.index, DocumentVersion.id.in_(ids))
                marked, shared = release(session, gone.keys)
            if not ids:
                return receipt
            self._finish(tenant_id, receipt, gone.files, raw)
            counted = {"versions": gone.versions, "kv_objects": marked, "kv_kept": shared}
            for kind, count in {**counted, **dict.fromkeys(("chunks", "vectors", "lexical"), gone.chunks)}.items():
                receipt[kind] += count

    def _documents(self, tenant_id: str, ids: Sequence[str], raw: bool) -> Receipt:
        with self.catalogue.write() as session:
            receipt, file_ids = delete_documents(session, self.index, ids)
        self._finish(tenant_id, receipt, file_ids, raw)
        return receipt

    def _finish(self, tenant_id: str, receipt: Receipt, file_ids: Sequence[str], raw: bool) -> None:
        """Delete the objects of what has left the tables."""
        try:
            sweep(self.catalogue, self.kv_delete)
        except StorageUnavailable:
            receipt["kv_owed"] = self._owed()
        for file_id in file_ids:
            if raw or self._is_internal(file_id):
                receipt["files" if self._delete_file(tenant_id, file_id) else "files_kept"] += 1

    def _is_internal(self, file_id: str) -> bool:
        """Whether nobody uploaded the file: a sync or an archive brought it."""
        with self.catalogue.read() as session:
            file = session.get(File, file_id)
        return file is not None and file.purpose == SOURCE_PURPOSE

    def _delete_file(self, tenant_id: str, file_id: str) -> bool:
        try:
            return delete_file(self.catalogue, self.objects, tenant_id, file_id)
        except NotFound:
            return True

    def _owed(self) -> int:
        with self.catalogue.read() as session:
            return session.scalar(select(func.count()).where(KVObject.status == "purge")) or 0


def _drop_schedules(session: Session, corpus_id: str) -> None:
    schedules = select(Schedule.id).where(Schedule.corpus_id == corpus_id)
    session.execute(delete(ScheduleRun).where(ScheduleRun.schedule_id.in_(schedules)))
    session.execute(delete(Schedule).where(Schedule.corpus_id == corpus_id))
    hooks = select(PushHook.id).where(PushHook.corpus_id == corpus_id)
    session.execute(delete(PushDelivery).where(PushDelivery.hook_id.in_(hooks)))
    session.execute(delete(PushHook).where(PushHook.corpus_id == corpus_id))


def delete_documents(
    session: Session, index: SearchIndex, ids: Sequence[str], *, keep: bool = False
) -> tuple[Receipt, list[str]]:
    """Remove documents from the catalogue and both indexes: the receipt so far, and the files they were
    read from. Their kept generations go too; with `keep` (a source no longer has them) the last one joins them instead.

    Work that still waits for them is cancelled; work that runs finds no document to commit to."""
    receipt = dict.fromkeys(KINDS, 0)
    named, ids = ids, _with_members(session, ids)
    of_these = JobFile.document_id.in_(ids)
    waiting = select(JobFile.id).where(of_these, JobFile.status == "pending", JobFile.action.in_(WITH_CONTENT))
    jobs = sorted(set(session.scalars(waiting.with_only_columns(JobFile.job_id))))
    for job_id in jobs:
        lock_job(session, job_id)
    cancel_waiting(session, waiting, "the document was deleted")
    chunks = session.scalar(select(func.count()).where(ChunkRow.document_id.in_(ids))) or 0
    gone = versions.Forgotten(0, 0, set(), [])
    if keep:
        _keep_last(session, index, ids)
    else:
        kept = or_(DocumentVersion.document_id.in_(ids), versions.of_documents(session, named, SEPARATOR))
        gone = versions.forget(session, index, kept)
    keys = drop_chunks(session, index, ids) | gone.keys
    receipt["kv_objects"], receipt["kv_kept"] = release(session, keys)
    receipt["chunks"] = receipt["vectors"] = receipt["lexical"] = chunks + gone.chunks
    receipt["versions"] = gone.versions
    read = session.scalars(select(Document.file_id).where(Document.id.in_(ids)).distinct())
    files = list(dict.fromkeys([*read, *gone.files]))
    receipt["documents"] = session.scalar(select(func.count()).where(Document.id.in_(ids))) or 0
    session.execute(delete(DocumentUse).where(DocumentUse.document_id.in_(ids)))
    session.execute(delete(Document).where(Document.id.in_(ids)))
    for job_id in jobs:
        settle(session, job_id)
    return receipt, files


def _keep_last(session: Session, index: SearchIndex, ids: Sequence[str]) -> None:
    now = time.time()
    for document in session.scalars(select(Document).where(Document.id.in_(ids))).all():
        versions.keep(session, index, document, session.get_one(Corpus, document.corpus_id), now)
        # Older generations have had the rights of the document so far; what it allowed last is what stays.
        older = update(DocumentVersion).where(DocumentVersion.document_id == document.id)
        session.execute(older.values(access=document.access).execution_options(synchronize_session=False))


def _with_members(session: Session, ids: Sequence[str]) -> list[str]:
    """The documents and, of archives among them, the files in them."""
    found = dict.fromkeys(ids)
    for document in session.scalars(select(Document).where(Document.id.in_(ids))).all():
        found.update(dict.fromkeys(m.id for m in members(session, document)))
    return list(found)


def record_purge(
    session: Session, tenant_id: str, corpus_id: str | None, receipt: Receipt, what: dict[str, Any], newest: int
) -> Job:
    """A finished delete job that keeps the receipt, so that it can be asked for later. `newest`: the number of the newest
    tombstone once all was deleted; a site that has erased up to there has erased this."""
    job = create_job(session, tenant_id=tenant_id, corpus_id=corpus_id, type="delete", request=what)
    job.started_at = time.time()
    job.result = {"receipt": receipt, "tombstone": newest}
    settle(session, job.id)
    return job
