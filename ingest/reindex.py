"""A corpus's chunks embedded again by another model: beside the index that is there, which answers until the new one is
whole and takes its place in one commit.

A `reindex` file of a job stands for one document's chunks. Each batch is a transaction of its own, and what is there is not
embedded again: a worker that dies costs a batch. The last file of a job sees to whatever is still lacking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.jobs import ACTIVE, OPEN_FILE, JobItem, create_job, settle
from ingest.leases import FileLease, Hold, finish, owned
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow, Corpus, Document, DocumentVersion, Job, JobFile, VersionChunk
from storage.catalogue.versions import past_of
from storage.errors import Cancelled, FileError
from storage.types import TextEmbedder, embedded_text, indexed_text

ACTION = "reindex"
BATCH = 32
CLEARED = 500  # chunks a transaction


class NewIndex(Protocol):
    """The generation of the index that the embedder of this process fills."""

    def lacking(self, session: Session, corpus_id: str, document_id: str | None = None) -> list[int]:
        """Chunks that it does not hold yet."""
        ...

    def stage(self, session: Session, corpus_id: str, rows: Sequence[tuple[int, str, Sequence[float]]]) -> None:
        """Write (chunk id, text, unit vector), to be found by nobody yet."""
        ...

    def flip(self, session: Session, corpus_id: str) -> bool:
        """Search the corpus in it from the commit on; False, and nothing done, while it lacks a chunk."""
        ...

    def clear(self, session: Session, corpus_id: str, most: int) -> int:
        """Remove some of what older generations hold of a corpus that was flipped; how many chunks."""
        ...


def queue(session: Session, corpus: Corpus, embedding: str) -> Job:
    """A job that embeds the corpus again; the one that is under way, if there is one."""
    running = select(Job).where(Job.corpus_id == corpus.id, Job.type == "reindex", Job.status.in_(ACTIVE))
    for job in session.scalars(running.with_for_update()):
        if job.request.get("embedding") == embedding and job.status != "cancelling":
            return job
    rows = session.scalars(select(Document).where(Document.corpus_id == corpus.id).order_by(Document.path))
    items = [JobItem(row.path, row.id, None, ACTION) for row in rows]  # no file is read, so any may be deleted
    kept = select(DocumentVersion.id).where(DocumentVersion.corpus_id == corpus.id).limit(1)
    if not items and session.scalar(kept) is not None:
        items = [JobItem("(kept generations)", None, None, ACTION)]
    if not items:
        corpus.index_generation = None  # the next document decides
    request = {"embedding": embedding}
    return create_job(
        session, tenant_id=corpus.tenant_id, corpus_id=corpus.id, type="reindex", items=items, request=request
    )


@dataclass(frozen=True)
class Reindexer:
    catalogue: Catalogue
    embedder: TextEmbedder
    index: NewIndex

    def takes(self, lease: FileLease) -> bool:
        with self.catalogue.read() as session:
            return session.scalar(select(JobFile.action).where(JobFile.id == lease.job_file_id)) == ACTION

    def run(self, lease: FileLease, hold: Hold) -> Iterator[None]:
        """Embed the file's chunks, batch by batch, and if it is the last one flip the index, in the transaction that ends it."""
        corpus_id, document_id = self._about(lease)
        while True:
            yield from self._fill(lease, hold, corpus_id, document_id)
            with self.catalogue.write() as session:
                row = owned(session, lease)
                others = select(JobFile.id).where(JobFile.job_id == row.job_id, JobFile.status.in_(OPEN_FILE))
                last = session.scalars(others.where(JobFile.id != row.id).limit(1)).first() is None
                if not last or self.index.flip(session, corpus_id):
                    of_document = select(func.count()).where(ChunkRow.document_id == row.document_id)
                    row.chunks_total = session.scalar(of_document) or 0
                    finish(session, row, "done")
                    settle(session, lease.job_id)
                    break
            document_id = None  # the last one: all that the corpus still lacks

        if last:
            self._clear(corpus_id)

    def _clear(self, corpus_id: str) -> None:
        """Transaction by transaction: others write in between."""
        left = True
        while left:
            with self.catalogue.write() as session:
                left = self.index.clear(session, corpus_id, CLEARED) > 0

    def _about(self, lease: FileLease) -> tuple[str, str | None]:
        with self.catalogue.read() as session:
            job = session.get(Job, lease.job_id)
            row = session.get(JobFile, lease.job_file_id)
        if job is None or row is None or job.corpus_id is None:
            raise Cancelled("the corpus was deleted")
        wanted = job.request.get("embedding")
        if wanted != self.embedder.identity:
            raise FileError(
                f"the job asks for the embedding model {wanted!r}, but this worker has {self.embedder.identity!r}: "
                "start the workers with the setting of the API",
                code="embedding_failed",
            )
        return job.corpus_id, row.document_id

    def _fill(self, lease: FileLease, hold: Hold, corpus_id: str, document_id: str | None) -> Iterator[None]:
        with self.catalogue.read() as session:
            ids = self.index.lacking(session, corpus_id, document_id)
        current, kept = [number for number in ids if number > 0], [number for number in ids if number < 0]
        for some, query, partition in ((current, _current, corpus_id), (kept, _kept, past_of(corpus_id))):
            for start in range(0, len(some), BATCH):
                hold.check()
                self._batch(lease, partition, query(some[start : start + BATCH]))
                yield

    def _batch(self, lease: FileLease, partition: str, chunks: Any) -> None:
        with self.catalogue.read() as session:
            read = session.execute(chunks).all()
        texts = [indexed_text(row.text, row.headings, row.path) for row in read]
        seen = [embedded_text(self.embedder, row.text, row.headings, row.path) for row in read]
        vectors = self.embedder.embed(seen) if seen else []
        with self.catalogue.write() as session:
            owned(session, lease)
            # What was deleted meanwhile stays deleted; a database may have given its id to another chunk.
            still = {row.id: row for row in session.execute(chunks)}
            new = [
                (row.id, text, vector)
                for row, text, vector in zip(read, texts, vectors, strict=True)
                if (now := still.get(row.id)) is not None and (now.document_id, now.text) == (row.document_id, row.text)
            ]
            self.index.stage(session, partition, new)


def _current(ids: Sequence[int]) -> Any:
    columns = (ChunkRow.id, ChunkRow.document_id, ChunkRow.text, ChunkRow.headings, Document.path)
    return select(*columns).join(Document, Document.id == ChunkRow.document_id).where(ChunkRow.id.in_(ids)).order_by(ChunkRow.id)


def _kept(numbers: Sequence[int]) -> Any:
    """Chunks of kept generations, by their numbers in the index."""
    columns = ((-VersionChunk.id).label("id"), VersionChunk.version_id.label("document_id"))
    query = select(*columns, VersionChunk.text, VersionChunk.headings, DocumentVersion.path)
    query = query.join(DocumentVersion, DocumentVersion.id == VersionChunk.version_id)
    return query.where(VersionChunk.id.in_([-number for number in numbers])).order_by(VersionChunk.id)
