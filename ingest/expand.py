"""Archives: each file in one becomes a document of its own, `archive.zip!/folder/name`, in the same job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.archive import Extracted, Skipped
from ingest.archive_isolated import expand_isolated
from ingest.attach import SEPARATOR, attach
from ingest.files import SOURCE_PURPOSE, drop_source_files, hold, store_file
from ingest.jobs import JobItem, add_items
from ingest.sources.types import refusal
from storage.access import is_open
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, Document, File, Job, JobFile
from storage.errors import FileError, PathClosed
from storage.types import ObjectStore

MOST_NAMED = 20  # skipped members that a warning names
LONGEST_NAMED = 200  # characters of such a name


@dataclass
class LeftOut:
    """What of an archive is no document: the first few with their reasons, and how many in all."""

    named: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, path: str, reason: str) -> None:
        self.count += 1
        if len(self.named) < MOST_NAMED:
            self.named.append(f"{path[:LONGEST_NAMED]}: {reason}")

    def warning(self) -> str | None:
        """What a job says of it."""
        return f"{self.count} files in the archive were left out: {', '.join(self.named)}" if self.count else None


@dataclass(frozen=True)
class Unpacked:
    """The stored files of an archive by path, and what is not among them."""

    files: dict[str, File] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)


def members(session: Session, archive: Document) -> Sequence[Document]:
    """The documents that came out of an archive. Of a document with a text of its own there are none: what lies below its path
    came there by itself."""
    if archive.usage_bytes or not archive.generation:
        return []
    prefix = archive.path + SEPARATOR
    inside = func.substr(Document.path, 1, len(prefix)) == prefix
    return session.scalars(select(Document).where(Document.corpus_id == archive.corpus_id, inside)).all()


def without_members(documents: Sequence[Document]) -> list[Document]:
    """Those that did not come out of an archive among them."""
    archives = {each.path for each in documents if each.generation and not each.usage_bytes}
    return [each for each in documents if archives.isdisjoint(_archives_of(each.path))]


def _archives_of(path: str) -> list[str]:
    """The paths of archives in which there may be such a file."""
    parts = path.split(SEPARATOR)
    return [SEPARATOR.join(parts[:count]) for count in range(1, len(parts))]


def refuse_within(path: str) -> None:
    """Raises FileError for the path of an archive that came out of an archive: what is packed again and again has no bounds."""
    if SEPARATOR in path:
        raise FileError("an archive within an archive is not opened; send it by itself", code="archive_limit")


def unpack(
    catalogue: Catalogue,
    objects: ObjectStore,
    tenant_id: str,
    path: str,
    archive: BinaryIO,
    check: Callable[[], None],
    found: Unpacked,
) -> None:
    """Store an archive's files, and add each to what was `found`. Raises FileError, StorageUnavailable, and whatever `check`
    raises between files; what has been found by then is to be dropped."""
    for part in expand_isolated(archive, path, check):
        check()
        reason = part.reason if isinstance(part, Skipped) else refusal(part.path, part.data)
        if reason:
            found.left_out.add(part.path, reason)
        elif isinstance(part, Extracted):
            name = path + SEPARATOR + part.path
            found.files[name] = store_file(catalogue, objects, tenant_id, name, part.data, SOURCE_PURPOSE)
    if not found.files:
        raise FileError("the archive holds no file that can be read", code="no_text_extracted")


def drop_unpacked(catalogue: Catalogue, objects: ObjectStore, tenant_id: str, files: Iterable[File]) -> None:
    """Forget an archive's stored files that nothing needs: it is not to be committed."""
    drop_source_files(catalogue, objects, tenant_id, [file.id for file in files])


def commit_members(
    session: Session, job: Job, corpus: Corpus, archive: Document, unpacked: Unpacked
) -> str | None:
    """Add the archive's files to the job, and delete the documents whose file it no longer holds. What to
    warn of. Raises StorageUnavailable if a stored file has been deleted since."""
    hold(session, [file.id for file in unpacked.files.values()])
    names = job.request.get("names")
    taken = set(session.scalars(select(JobFile.path).where(JobFile.job_id == job.id)))
    items = [
        JobItem(old.path, old.id, old.file_id, "delete")
        for old in members(session, archive)
        if old.path not in unpacked.files and is_open(old.access, names)
    ]
    for path, file in unpacked.files.items():
        try:
            document = attach(
                session, corpus, path, file.id, file.sha256,
                attributes=archive.attributes, access=archive.access, names=names,
            )  # fmt: skip
        except PathClosed:
            unpacked.left_out.add(path.removeprefix(archive.path + SEPARATOR), "its path is not the asker's to write to")
            continue
        items.append(JobItem(path, document.id, file.id))
    add_items(session, job, [item for item in items if item.path not in taken])
    return unpacked.left_out.warning()
