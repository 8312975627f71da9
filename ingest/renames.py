"""A document moved to another path: its chunks and their KV stay as they are, and are found by the new name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.embedding import Asked
from ingest.expand import members
from ingest.jobs import settle
from ingest.leases import FileLease, Hold, finish
from ingest.run import Rest
from ingest.types import SearchIndex
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow, Document, JobFile
from storage.errors import FileError, UserError
from storage.types import indexed_text

Named = Sequence[tuple[int, str, Sequence[float]]]  # chunk, text, vector


@dataclass(frozen=True)
class Renamer:
    """`ask` has chunks embedded under a path; `locked` gives the file and its document in the transaction that moves it."""

    catalogue: Catalogue
    index: SearchIndex
    ask: Callable[[FileLease, Sequence[ChunkRow], str], Asked]
    locked: Callable[[Session, FileLease], tuple[JobFile, Document]]

    def run(self, lease: FileLease, hold: Hold) -> Rest | None:
        """What is left once vectors are asked for; None if it has been moved, since no text changes by the name."""
        path, chunks = self._named_anew(lease)
        if not chunks:
            self._move(lease, [])
            return None
        asked = self.ask(lease, chunks, path)

        def end() -> None:
            texts = [indexed_text(chunk.text, chunk.headings, path) for chunk in chunks]
            rows = zip(chunks, texts, asked.result(hold.check), strict=True)
            self._move(lease, [(chunk.id, text, vector) for chunk, text, vector in rows if vector is not None])

        return Rest(end, asked.drop, asked.done, sum(len(chunk.text) for chunk in chunks))

    def _move(self, lease: FileLease, named: Named) -> None:
        with self.catalogue.write() as session:
            row, document = self.locked(session, lease)
            taken = select(Document.id).where(Document.corpus_id == document.corpus_id, Document.path == row.path)
            if session.scalars(taken.where(Document.id != document.id)).first() is not None:
                raise FileError("another document has taken the new path", code="invalid_file")
            old_path = document.path
            for member in members(session, document):
                member.path = row.path + member.path.removeprefix(old_path)
            document.path = row.path
            self._index_anew(session, document, named)
            finish(session, row, "done")
            settle(session, lease.job_id)

    def _named_anew(self, lease: FileLease) -> tuple[str, Sequence[ChunkRow]]:
        """The document's new path, and its chunks, which the index is to have under that; none if the name stays."""
        with self.catalogue.read() as session:
            row = session.get_one(JobFile, lease.job_file_id)
            document = session.get(Document, row.document_id)
            if document is None or PurePosixPath(document.path).stem == PurePosixPath(row.path).stem:
                return row.path, []
            query = select(ChunkRow).where(ChunkRow.document_id == document.id).order_by(ChunkRow.ordinal)
            return row.path, session.scalars(query).all()

    def _index_anew(self, session: Session, document: Document, rows: Named) -> None:
        try:
            self.index.add(session, document.corpus_id, [])
        except UserError:  # the corpus waits for a reindex, which will see the new name
            return
        held = set(session.scalars(select(ChunkRow.id).where(ChunkRow.document_id == document.id)))
        rows = [row for row in rows if row[0] in held]
        self.index.remove(session, [row[0] for row in rows])
        self.index.add(session, document.corpus_id, rows)
