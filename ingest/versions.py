"""Kept generations: what was replaced, or deleted by a sync, stays for as long as its corpus's settings say.

`keep_versions` is a time such as "30d" or "12h", or how many generations of each document. They lie in tables of their
own and in partitions of their own of both indexes, so that nothing that works on what is current can meet them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, delete, func, or_, select
from sqlalchemy.orm import Session

from ingest.purge import release
from ingest.types import SearchIndex
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow, Corpus, Document, DocumentVersion, VersionChunk
from storage.catalogue.versions import past_of
from storage.errors import UserError

BATCH = 50  # generations per transaction
MOST = 1000
_UNITS = {"h": 3600.0, "d": 86400.0}
_OWN = ("id", "document_id", "corpus_id", "tenant_id", "head", "tail")  # plain prompts hold current text
_CHUNK = [c.key for c in ChunkRow.__table__.columns if c.key not in _OWN]


@dataclass(frozen=True)
class Keeping:
    """For how long, or how many of each document."""

    seconds: float | None = None
    count: int | None = None

    @classmethod
    def of(cls, said: str | int | None) -> Keeping | None:
        """What `keep_versions` means; None: nothing is kept. Raises UserError."""
        if said in (None, 0, ""):
            return None
        if isinstance(said, int):
            if not 0 < said <= MOST:
                raise UserError(f"keep_versions: a number of generations is from 0 to {MOST}")
            return cls(count=said)
        found = re.fullmatch(r"(\d{1,5})([hd])", str(said))
        if not found or not int(found[1]):
            raise UserError('keep_versions is a time such as "30d" or "12h", a number of generations, or 0')
        return cls(seconds=int(found[1]) * _UNITS[found[2]])

    def is_over(self, now: float) -> ColumnElement[bool]:
        """Which generations are kept no longer."""
        if self.seconds is not None:
            return DocumentVersion.valid_to < now - self.seconds
        newer = func.row_number().over(
            partition_by=DocumentVersion.document_id, order_by=(DocumentVersion.valid_to.desc(), DocumentVersion.id)
        )
        ranked = select(DocumentVersion.id, newer.label("rank")).subquery()
        return DocumentVersion.id.in_(select(ranked.c.id).where(ranked.c.rank > self.count))


def keep(session: Session, index: SearchIndex, document: Document, corpus: Corpus, now: float) -> None:
    """Put the document's current generation aside, if its corpus keeps any. Its chunks are still to be dropped."""
    if Keeping.of(corpus.settings.get("keep_versions")) is None or document.current_since is None:
        return
    chunks = session.scalars(select(ChunkRow).where(ChunkRow.document_id == document.id)).all()
    if not chunks:
        return
    same = ("corpus_id", "tenant_id", "file_id", "path", "sha256", "generation", "access", "attributes", "not_stored", "codec")
    version = DocumentVersion(
        id=f"ver-{document.id}-{document.generation}",
        document_id=document.id,
        valid_from=document.current_since,
        valid_to=max(now, document.current_since),
        **{name: getattr(document, name) for name in same},
    )
    session.add(version)
    session.flush()
    copies = [VersionChunk(version_id=version.id, **{name: getattr(c, name) for name in _CHUNK}) for c in chunks]
    session.add_all(copies)
    session.flush()
    pairs = [(chunk.number, copy.number) for chunk, copy in zip(chunks, copies, strict=True)]
    index.copy(session, pairs, past_of(corpus.id))


@dataclass
class Forgotten:
    """What was removed with kept generations: how many, their chunks, and the KV keys and files that they had."""

    versions: int
    chunks: int
    keys: set[str]
    files: list[str]


def forget(session: Session, index: SearchIndex, which: ColumnElement[bool]) -> Forgotten:
    """Remove kept generations from the tables and both indexes. Their keys are still to be released."""
    found = session.execute(select(DocumentVersion.id, DocumentVersion.file_id).where(which)).all()
    ids = [row[0] for row in found]
    of_these = VersionChunk.version_id.in_(ids)
    chunks = session.execute(select(VersionChunk.id, VersionChunk.kv_key).where(of_these)).all()
    if chunks:
        index.remove(session, [-chunk_id for chunk_id, _ in chunks])
        session.execute(delete(VersionChunk).where(of_these))
    session.execute(delete(DocumentVersion).where(DocumentVersion.id.in_(ids)))
    keys = {key for _, key in chunks if key is not None}
    return Forgotten(len(ids), len(chunks), keys, list(dict.fromkeys(row[1] for row in found)))


def of_documents(session: Session, ids: Sequence[str], separator: str) -> ColumnElement[bool]:
    """All generations of these documents, of those that were at their paths before, and of the files in archives."""
    rules: list[ColumnElement[bool]] = [DocumentVersion.document_id.in_(ids)]
    for corpus_id, path in session.execute(select(Document.corpus_id, Document.path).where(Document.id.in_(ids))):
        inside = func.substr(DocumentVersion.path, 1, len(path + separator)) == path + separator
        rules.append(and_(DocumentVersion.corpus_id == corpus_id, or_(DocumentVersion.path == path, inside)))
    return or_(*rules)


@dataclass(frozen=True)
class Expiry:
    """Forgets what has been kept for long enough. `index` is made only where there is something to forget, `clean` is
    given the files that nothing may need any more."""

    catalogue: Catalogue
    index: Callable[[], SearchIndex]
    clean: Callable[[str, Sequence[str]], None]

    def tick(self, now: float | None = None) -> int:
        """The number of generations that were forgotten."""
        now = time.time() if now is None else now
        with self.catalogue.read() as session:
            holding = session.scalars(select(DocumentVersion.corpus_id).distinct()).all()
        return sum(self._corpus(corpus_id, now) for corpus_id in holding)

    def _corpus(self, corpus_id: str, now: float) -> int:
        with self.catalogue.read() as session:
            corpus = session.get(Corpus, corpus_id)
            if corpus is None or not self._due(session, corpus, now):
                return 0
        index, gone = self.index(), 0
        while (done := self._some(index, corpus_id, now)) is not None:
            gone += done.versions
        return gone

    def _due(self, session: Session, corpus: Corpus, now: float) -> Sequence[str]:
        keeping = Keeping.of(corpus.settings.get("keep_versions"))
        due = select(DocumentVersion.id).where(DocumentVersion.corpus_id == corpus.id)
        due = due if keeping is None else due.where(keeping.is_over(now))
        return session.scalars(due.order_by(DocumentVersion.valid_to).limit(BATCH)).all()

    def _some(self, index: SearchIndex, corpus_id: str, now: float) -> Forgotten | None:
        with self.catalogue.write() as session:
            corpus = session.get(Corpus, corpus_id, with_for_update=True)
            ids = self._due(session, corpus, now) if corpus is not None else ()
            if corpus is None or not ids:
                return None
            these = DocumentVersion.id.in_(ids)
            newest = session.scalar(select(func.max(DocumentVersion.valid_to)).where(these)) or 0.0
            if corpus.versions_from is not None:
                corpus.versions_from = max(corpus.versions_from, newest)
            done = forget(session, index, these)
            release(session, done.keys)
            tenant_id = corpus.tenant_id
        self.clean(tenant_id, done.files)
        return done
