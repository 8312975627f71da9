"""What a policy says of storing, its codec and sites, brought to documents that are there: page by page, a page a tick.

A document that must not be stored loses its keys in one transaction; its chunks stay searchable and are computed at query
time. One that may be stored again is queued like any document that is out of date."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqlalchemy import exists, select, update
from sqlalchemy.orm import Session

from ingest.jobs import ACTIVE, queue_refresh
from ingest.purge import release
from ingest.types import Ring
from storage.catalogue.engine import Catalogue
from storage.catalogue.facts import facts_of, page_of
from storage.catalogue.schema import ChunkRow, Corpus, Document, DocumentVersion, Job, Site, VersionChunk
from storage.catalogue.sites import replicate
from storage.policy.file import PolicyFile
from storage.policy.types import Decision

PASS_SECONDS = 600.0  # between two passes over all documents, whose age and use change, and whose paths and tags may


class StorePass:
    """Safe to run in several processes at once: what one has done, the other finds done."""

    def __init__(self, catalogue: Catalogue, policy: PolicyFile, ring: Ring, clock: Callable[[], float] = time.time) -> None:
        self._catalogue, self._policy, self._ring, self._clock = catalogue, policy, ring, clock
        self._version = ""  # of the policy that the running pass applies
        self._after: str | None = None  # the last document it has seen; None: no pass is running
        self._next = 0.0

    def tick(self) -> int:
        """Apply the policy to one page of documents, if a pass is due; how many of them changed."""
        policy, now = self._policy.current(), self._clock()
        if self._version != self._policy.version or (self._after is None and now >= self._next):
            self._version, self._after, self._next = self._policy.version, "", now + PASS_SECONDS
        if self._after is None:
            return 0
        with self._catalogue.read() as session:
            corpora = self._corpora(session)
            page = page_of(session, corpora, self._after)
            facts = facts_of(session, page, policy.needs_use)
        self._after = page[-1][0].id if page else None
        decided = {fact.document_id: policy.decide(fact, now) for fact in facts}
        self._replicate(decided)
        return self._apply([document for document, _ in page], decided)

    def _replicate(self, decided: dict[str, Decision]) -> None:
        """Note at each site what it is to hold. A name of no site is passed over."""
        documents: dict[str, list[str]] = {}
        for document_id, decision in decided.items():
            for name in decision.actions.replicate or ():
                documents.setdefault(name, []).append(document_id)
        if not documents:
            return
        with self._catalogue.write() as session:
            query = select(Site).where(Site.name.in_(documents), Site.removed_at.is_(None))
            for site in session.scalars(query).all():
                held = select(ChunkRow.kv_key).where(
                    ChunkRow.document_id.in_(documents[site.name]), ChunkRow.tenant_id == site.tenant_id
                )
                replicate(session, site, filter(None, session.scalars(held).all()))

    def _corpora(self, session: Session) -> list[str]:
        """Those of whose documents anything is said, or was said under an earlier policy."""
        policy = self._policy.current()
        if not policy.speaks_of("store", "codec", "replicate"):
            query = select(Document.corpus_id).where(Document.not_stored.is_not(None) | Document.codec.is_not(None))
            return list(session.scalars(query.distinct()))
        return list(session.scalars(select(Corpus.id)))

    def _apply(self, documents: Sequence[Document], decided: dict[str, Decision]) -> int:
        # A codec is part of the key, so another one is another object: the document is computed anew.
        recode = [d.id for d in documents if d.not_stored is None and decided[d.id].stored and _other(d, decided[d.id])]
        drop = [d.id for d in documents if d.not_stored is None and not decided[d.id].stored]
        restore = recode + [d.id for d in documents if d.not_stored is not None and decided[d.id].stored]
        renamed = [
            d.id for d in documents
            if d.not_stored is not None and not decided[d.id].stored and decided[d.id].by["store"] != d.not_stored
        ]  # fmt: skip
        changed = 0
        for document_id in [*drop, *renamed]:
            with self._catalogue.write() as session:
                changed += _drop(session, document_id, decided[document_id].by["store"])
        if restore:
            with self._catalogue.write() as session:
                queued = _restore(session, restore)
            if queued:
                self._ring("ingest")
            changed += queued
        return changed


def _other(document: Document, decision: Decision) -> bool:
    """Whether its KV is to be stored with another codec than it is."""
    return document.usage_bytes > 0 and document.codec != decision.actions.codec


def _drop(session: Session, document_id: str, rule: str) -> bool:
    """Take the keys from a document's chunks, and release what no other chunk needs."""
    document = session.get(Document, document_id, with_for_update=True, populate_existing=True)
    if document is None or document.status != "completed":
        return False
    held = ChunkRow.document_id == document_id, ChunkRow.kv_key.is_not(None)
    keys = set(filter(None, session.scalars(select(ChunkRow.kv_key).where(*held))))
    if not keys and document.not_stored is None:
        return False  # an archive, or a model whose state is not stored at all
    session.execute(update(ChunkRow).where(*held).values(kv_key=None))
    kept = VersionChunk.version_id.in_(select(DocumentVersion.id).where(DocumentVersion.document_id == document_id))
    keys |= set(filter(None, session.scalars(select(VersionChunk.kv_key).where(kept))))
    session.execute(update(VersionChunk).where(kept).values(kv_key=None).execution_options(synchronize_session=False))
    document.not_stored = rule
    session.flush()
    release(session, keys)
    return True


def _restore(session: Session, document_ids: Sequence[str]) -> int:
    """Queue documents as out of date, unless a job of their corpus is at work already."""
    busy = exists().where(Job.corpus_id == Document.corpus_id, Job.status.in_(ACTIVE))
    query = select(Document).where(Document.id.in_(document_ids), Document.status == "completed", ~busy)
    rows = session.scalars(query.order_by(Document.path).with_for_update()).all()
    by_corpus: dict[str, list[Document]] = {}
    for row in rows:
        row.done_hash = None
        by_corpus.setdefault(row.corpus_id, []).append(row)
    for corpus_id, found in by_corpus.items():
        queue_refresh(session, session.get_one(Corpus, corpus_id), found)
    return len(rows)
