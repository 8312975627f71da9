"""Archives: each file in one becomes a document of its own, `archive.zip!/folder/name`, in the same job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.archive import Skipped
from ingest.archive_isolated import expand_isolated
from ingest.detect import is_binary
from ingest.files import SOURCE_PURPOSE, store_file
from ingest.jobs import SEPARATOR, JobItem, add_items, attach
from storage.access import is_open
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, Document, File, Job, JobFile
from storage.errors import FileError, PathClosed
from storage.types import ObjectStore

MOST_NAMED = 20  # skipped members that a warning names


@dataclass(frozen=True)
class Unpacked:
    """The stored files of an archive by path, and what was left out."""

    files: Mapping[str, File]
    skipped: tuple[str, ...]


def is_member(path: str) -> bool:
    """Whether a document's path is that of a file in an archive."""
    return SEPARATOR in path


def members(session: Session, corpus_id: str, archive: str) -> Sequence[Document]:
    """The documents that came out of an archive."""
    prefix = archive + SEPARATOR
    inside = func.substr(Document.path, 1, len(prefix)) == prefix
    return session.scalars(select(Document).where(Document.corpus_id == corpus_id, inside)).all()


def unpack(
    catalogue: Catalogue,
    objects: ObjectStore,
    tenant_id: str,
    path: str,
    archive: BinaryIO,
    check: Callable[[], None],
) -> Unpacked:
    """Store an archive's files. Raises FileError, StorageUnavailable, and whatever `check` raises between
    files."""
    files: dict[str, File] = {}
    skipped: list[str] = []
    for part in expand_isolated(archive, path, check):
        check()
        if isinstance(part, Skipped):
            skipped.append(f"{part.path}: {part.reason}")
        elif is_binary(part.data):
            skipped.append(f"{part.path}: binary")
        else:
            name = path + SEPARATOR + part.path
            files[name] = store_file(catalogue, objects, tenant_id, name, part.data, SOURCE_PURPOSE)
    if not files:
        raise FileError("the archive holds no file that can be read", code="no_text_extracted")
    return Unpacked(files, tuple(skipped))


def commit_members(
    session: Session, job: Job, corpus: Corpus, archive: Document, unpacked: Unpacked
) -> str | None:
    """Add the archive's files to the job, and delete the documents whose file it no longer holds. What to
    warn of."""
    names = job.request.get("names")
    taken = set(session.scalars(select(JobFile.path).where(JobFile.job_id == job.id)))
    items = [
        JobItem(old.path, old.id, old.file_id, "delete")
        for old in members(session, corpus.id, archive.path)
        if old.path not in unpacked.files and is_open(old.access, names)
    ]
    skipped = list(unpacked.skipped)
    for path, file in unpacked.files.items():
        try:
            document = attach(
                session, corpus, path, file.id, file.sha256,
                attributes=archive.attributes, access=archive.access, names=names,
            )  # fmt: skip
        except PathClosed:
            skipped.append(f"{path.removeprefix(archive.path + SEPARATOR)}: its path is not the asker's to write to")
            continue
        items.append(JobItem(path, document.id, file.id))
    add_items(session, job, [item for item in items if item.path not in taken])
    if not skipped:
        return None
    named = ", ".join(skipped[:MOST_NAMED])
    return f"{len(skipped)} files in the archive were left out: {named}"
