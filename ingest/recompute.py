"""Stored KV that is to be computed again though no document has changed: a job of the type `precompute` for each corpus."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ingest.jobs import batches, queue_refresh
from storage.catalogue.schema import ChunkRow, Corpus, Document, Job, KVObject


def queue_recompute(session: Session, keys: Sequence[str]) -> list[Job]:
    """Jobs over the documents whose chunks have these keys, of what is marked as stored and was found broken. Each ends when
    its KV is stored again, or says that it cannot be. Until then the chunks are computed when asked."""
    documents: dict[str, Document] = {}
    for some in batches(keys):
        chunks = session.execute(select(ChunkRow.kv_key, ChunkRow.document_id).where(ChunkRow.kv_key.in_(some))).all()
        ids = {document_id for _, document_id in chunks}
        documents |= {each.id: each for each in session.scalars(select(Document).where(Document.id.in_(ids)))}
        of_documents = {key for key, _ in chunks}
        # What has failed a job owes anew, and counts as its own. What only a kept generation refers to the KV queue lets go.
        for status, found in (("failed", of_documents), ("pending", set(some) - of_documents)):
            broken = update(KVObject).where(KVObject.key.in_(found), KVObject.status == "done")
            again = broken.values(status=status, attempt=0, job_id=None, lease_owner=None, lease_expires=None)
            session.execute(again.execution_options(synchronize_session=False))
    by_corpus: dict[str, list[Document]] = {}
    for document in sorted(documents.values(), key=lambda each: each.path):
        by_corpus.setdefault(document.corpus_id, []).append(document)
    return [queue_refresh(session, session.get_one(Corpus, corpus_id), found) for corpus_id, found in sorted(by_corpus.items())]
