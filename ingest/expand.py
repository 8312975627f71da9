"""Archives: each file in one becomes a document of its own, `archive.zip!/folder/name`, in the same job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.archive import Extracted, Skipped
from ingest.archive_isolated import expand_isolated
from ingest.detect import is_binary
from ingest.files import SOURCE_PURPOSE, delete_file, store_file
from ingest.jobs import SEPARATOR, JobItem, add_items, attach
from ingest.leases import LeaseLost
from storage.access import is_open
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, Document, File, Job, JobFile
from storage.errors import FileError, NotFound, Overloaded, PathClosed, StorageUnavailable
from storage.types import ObjectStore

log = structlog.get_logger()
MOST_NAMED = 20  # skipped members that a warning names
LONGEST_NAMED = 200  # characters of such a name


@dataclass(frozen=True)
class Unpacked:
    """The stored files of an archive by path; the first of what was left out, and how many in all."""

    files: Mapping[str, File]
    skipped: tuple[str, ...]
    left_out: int


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
    """Store an archive's files. Raises FileError, StorageUnavailable, and whatever `check` raises between files; then none of
    them is left that nothing else needs."""
    files: dict[str, File] = {}
    skipped: list[str] = []
    left_out = 0
    try:
        for part in expand_isolated(archive, path, check):
            check()
            reason = part.reason if isinstance(part, Skipped) else "binary" if is_binary(part.data) else ""
            if reason:
                left_out += 1
                if left_out <= MOST_NAMED:
                    skipped.append(f"{part.path[:LONGEST_NAMED]}: {reason}")
            elif isinstance(part, Extracted):
                name = path + SEPARATOR + part.path
                files[name] = store_file(catalogue, objects, tenant_id, name, part.data, SOURCE_PURPOSE)
    except LeaseLost:
        raise  # they are for whoever holds the archive now
    except BaseException:
        drop_unpacked(catalogue, objects, tenant_id, files.values())
        raise
    if not files:
        raise FileError("the archive holds no file that can be read", code="no_text_extracted")
    return Unpacked(files, tuple(skipped), left_out)


def drop_unpacked(catalogue: Catalogue, objects: ObjectStore, tenant_id: str, files: Iterable[File]) -> None:
    """Forget an archive's stored files that nothing needs: it is not to be committed. A store that does not answer is not
    asked ten thousand times: the next run of the archive finds the files that are left."""
    for file in files:
        try:
            delete_file(catalogue, objects, tenant_id, file.id)
        except NotFound:
            continue
        except (StorageUnavailable, Overloaded):
            log.info("unpacked_files_kept", first=file.id)
            return


def _hold(session: Session, file_ids: Sequence[str]) -> None:
    """Keep stored files until the transaction ends. Between their storing and this nothing needed them, so whoever let go of
    an older use of the same file may have deleted it: then the archive has to be unpacked again."""
    ordered = sorted(set(file_ids))
    held = 0
    for start in range(0, len(ordered), 500):
        some = File.id.in_(ordered[start : start + 500])
        held += len(session.scalars(select(File.id).where(some).order_by(File.id).with_for_update()).all())
    if held < len(ordered):
        raise StorageUnavailable("a file of the archive was deleted meanwhile")


def commit_members(
    session: Session, job: Job, corpus: Corpus, archive: Document, unpacked: Unpacked
) -> str | None:
    """Add the archive's files to the job, and delete the documents whose file it no longer holds. What to
    warn of. Raises StorageUnavailable if a stored file has been deleted since."""
    _hold(session, [file.id for file in unpacked.files.values()])
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
    left_out = unpacked.left_out + len(skipped) - len(unpacked.skipped)
    if not left_out:
        return None
    named = ", ".join(skipped[:MOST_NAMED])
    return f"{left_out} files in the archive were left out: {named}"
