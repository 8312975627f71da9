"""The one transaction in which a document's new generation appears and its old one disappears."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from ingest import versions
from ingest.jobs import lock_job
from ingest.leases import finish
from ingest.purge import owe, release
from ingest.types import SearchIndex
from storage.anchors import anchors_of
from storage.catalogue.schema import ChunkRow, Corpus, Document, File, JobFile
from storage.keys import token_bytes
from storage.types import Chunk, indexed_text

TOKEN_BYTES = 4


@dataclass(frozen=True)
class Prepared:
    """All that a document's next generation consists of, computed before the transaction begins."""

    file: File
    done_hash: str
    chunks: Sequence[Chunk]
    vectors: Sequence[Sequence[float]]
    kv_keys: Sequence[str | None]
    skipped: int = 0  # chunks that could not be embedded: they are not stored
    warnings: tuple[str, ...] = ()
    not_stored: str | None = None  # the policy rule that keeps the KV out of the store
    codec: str | None = None  # chosen by a policy rule


def commit(
    session: Session, index: SearchIndex, row: JobFile, document: Document, corpus: Corpus, new: Prepared
) -> None:
    """Replace the document's chunks, owe their KV, and end the file as done."""
    now = time.time()
    versions.keep(session, index, document, corpus, now)
    old_keys = drop_chunks(session, index, [document.id])
    chunks = [_chunk_row(document, chunk, key) for chunk, key in zip(new.chunks, new.kv_keys, strict=True)]
    session.add_all(chunks)
    session.flush()
    rows = [(c.id, indexed_text(c.text, c.headings, document.path), v) for c, v in zip(chunks, new.vectors, strict=True)]
    index.add(session, corpus.id, rows)
    keys = {key: len(c.token_ids) for c, key in zip(new.chunks, new.kv_keys, strict=True) if key is not None}
    _count(session, row, document, corpus, keys, [k for k in new.kv_keys if k is not None], len(chunks))
    release(session, old_keys - set(keys))
    document.file_id, document.sha256 = new.file.id, new.file.sha256
    document.generation += 1
    document.current_since = max(now, document.current_since or now)
    document.status, document.not_stored, document.codec = "completed", new.not_stored, new.codec
    document.usage_bytes = sum(len(c.text.encode()) + len(c.token_ids) for c in chunks)
    _note(row, document, new)
    finish(session, row, "done")


def _note(row: JobFile, document: Document, new: Prepared) -> None:
    """Say what is missing. A document with a chunk missing is not marked as done, so that a next run tries
    it again."""
    message = "; ".join(new.warnings) or None
    if new.skipped:
        total = new.skipped + len(new.chunks)
        lost = f"{new.skipped} of {total} chunks could not be embedded and are not searchable"
        message = "; ".join([lost, *new.warnings])
        row.error_code = "embedding_failed"
    row.error_message = document.error_message = message
    document.error_code = row.error_code
    document.done_hash = None if new.skipped else new.done_hash


def keep(session: Session, row: JobFile, document: Document, corpus: Corpus, file: File) -> None:
    """End a file whose document is up to date: unchanged, or done if KV of it has to be computed again."""
    stored = session.execute(
        select(ChunkRow.kv_key, func.length(ChunkRow.token_ids)).where(ChunkRow.document_id == document.id)
    ).all()
    keys = {key: size // TOKEN_BYTES for key, size in stored if key is not None}
    owed = _count(session, row, document, corpus, keys, [k for k, _ in stored if k is not None], len(stored))
    document.file_id = file.id
    document.status, document.error_code = "completed", None
    finish(session, row, "done" if owed else "unchanged")


def _count(
    session: Session,
    row: JobFile,
    document: Document,
    corpus: Corpus,
    keys: Mapping[str, int],
    of_chunks: Sequence[str],
    total: int,
) -> int:
    """Owe the keys, and count in the job what was there already. The number of keys owed."""
    owed, reused_bytes = owe(session, keys, document.tenant_id, corpus.sharing_group, row.job_id)
    row.chunks_total = total
    row.chunks_reused = len(of_chunks) - len(owed)
    job = lock_job(session, row.job_id)
    if job is not None and reused_bytes:
        job.result = {**job.result, "reused_bytes": job.result.get("reused_bytes", 0) + reused_bytes}
    return len(owed)


def drop_chunks(session: Session, index: SearchIndex, document_ids: Sequence[str]) -> set[str]:
    """Remove documents' chunks from the tables and both indexes; the KV keys that they had."""
    of_these = ChunkRow.document_id.in_(document_ids)
    stored = session.execute(select(ChunkRow.id, ChunkRow.kv_key).where(of_these)).all()
    if stored:
        index.remove(session, [chunk_id for chunk_id, _ in stored])
        session.execute(delete(ChunkRow).where(of_these))
    return {key for _, key in stored if key is not None}


def _chunk_row(document: Document, chunk: Chunk, key: str | None) -> ChunkRow:
    head, tail = anchors_of(chunk.token_ids) or (None, None)
    return ChunkRow(
        document_id=document.id,
        corpus_id=document.corpus_id,
        tenant_id=document.tenant_id,
        ordinal=chunk.ordinal,
        text=chunk.text,
        token_ids=token_bytes(chunk.token_ids),
        start=chunk.start,
        end=chunk.end,
        headings=list(chunk.headings),
        page_start=chunk.page_start,
        page_end=chunk.page_end,
        line_start=chunk.line_start,
        line_end=chunk.line_end,
        header=chunk.header,
        kv_key=key,
        head=head,
        tail=tail,
    )
