"""Uploaded files: a row each, and their bytes once per tenant under a name made of their hash.

A file is never in memory whole on its way in or out: only who parses it reads it so."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, cast, overload

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.jobs import new_id
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Document, DocumentVersion, File, JobFile
from storage.errors import NotFound, ObjectMissing, Overloaded, StorageUnavailable
from storage.quota import check_room
from storage.types import ObjectStore

log = structlog.get_logger()
PIECE = 1 << 20
IN_MEMORY = 8 << 20  # of a file that is read; what is larger lies in a temporary file
SOURCE_PURPOSE = "source"  # of files that a sync or an archive brought: they go when no document needs them
PART = "part:"  # begins the purpose of what is no whole upload yet, and in no list: the upload's id follows


def raw_name(tenant_id: str, sha256: str) -> str:
    """The object's name. Tenants are kept apart, and their ids may hold any characters."""
    return f"raw/{owner_part(tenant_id)}/{sha256}"


def owner_part(tenant_id: str) -> str:
    """The part of the object's name that tells whose it is."""
    return hashlib.sha256(tenant_id.encode()).hexdigest()[:32]


class Pieces(Sequence[bytes]):
    """A seekable stream as parts to be stored, each read when it is asked for."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size = stream.seek(0, os.SEEK_END)

    def __len__(self) -> int:
        return -(-self.size // PIECE)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        self._stream.seek(at * PIECE)
        return self._stream.read(PIECE)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for piece in self:
            digest.update(piece)
        return digest.hexdigest()


def store_file(
    catalogue: Catalogue,
    objects: ObjectStore,
    tenant_id: str,
    filename: str,
    data: bytes | BinaryIO,
    purpose: str = "assistants",
) -> File:
    """Store an upload: its bytes, or a stream that can be read from its start again. The same name with the same bytes
    is the same file, so that a repeated upload changes nothing.

    Raises StorageUnavailable, QuotaExceeded."""
    pieces = Pieces(io.BytesIO(data) if isinstance(data, bytes) else data)
    sha256 = pieces.sha256()
    name = raw_name(tenant_id, sha256)
    if objects.size(name) != pieces.size:
        with catalogue.read() as session:
            check_room(session, tenant_id, pieces.size)
        objects.put(name, pieces)
    with catalogue.write() as session:
        same = select(File).where(
            File.tenant_id == tenant_id, File.sha256 == sha256, File.filename == filename
        )
        file = session.scalars(same.where(File.purpose == purpose)).first()
        if file is None:
            file = File(
                id=new_id("file"),
                tenant_id=tenant_id,
                filename=filename,
                bytes=pieces.size,
                sha256=sha256,
                purpose=purpose,
                created_at=time.time(),
            )
            session.add(file)
            session.flush()
        if objects.size(name) is None:  # a deletion came between
            objects.put(name, pieces)
    return file


def read_file(objects: ObjectStore, file: File) -> bytes:
    """The bytes as they were uploaded. Raises StorageUnavailable, ObjectMissing."""
    with open_file(objects, file) as stream:
        return stream.read()


@contextmanager
def open_file(objects: ObjectStore, file: File) -> Iterator[BinaryIO]:
    """The bytes as they were uploaded, all read and compared with their hash, as a stream at its start. Raises
    StorageUnavailable, ObjectMissing."""
    name, digest, read = raw_name(file.tenant_id, file.sha256), hashlib.sha256(), 0
    buffer = memoryview(bytearray(min(IN_MEMORY, file.bytes)))
    with tempfile.SpooledTemporaryFile(IN_MEMORY) as spooled:
        while read < file.bytes:
            got = buffer[: objects.read_into(name, buffer[: file.bytes - read], read)]
            if not len(got):
                break
            digest.update(got)
            spooled.write(got)
            read += len(got)
        if digest.hexdigest() != file.sha256:
            raise ObjectMissing("the stored file is damaged; upload it again")
        spooled.seek(0)
        yield cast(BinaryIO, spooled)


def hold(session: Session, file_ids: Iterable[str]) -> None:
    """Keep stored files until the transaction ends. Between their storing and this nothing needed them, so whoever let go of
    an older use of the same file may have deleted it: raises StorageUnavailable, and they are to be stored again."""
    ordered = sorted(set(file_ids))
    held = 0
    for some in (ordered[start : start + 500] for start in range(0, len(ordered), 500)):
        query = select(File.id).where(File.id.in_(some)).order_by(File.id).with_for_update()
        held += len(session.scalars(query).all())
    if held < len(ordered):
        raise StorageUnavailable("a stored file was deleted meanwhile")


def drop_source_files(catalogue: Catalogue, objects: ObjectStore, tenant_id: str, file_ids: Iterable[str]) -> int:
    """Forget those of these files that a sync, an archive or an unfinished upload had brought, if nothing needs them any more;
    how many. A store that does not answer is not asked ten thousand times: what is left is found by `garbage.drop_leftovers`."""
    gone = 0
    for file_id in file_ids:
        with catalogue.read() as session:
            file = session.get(File, file_id)
        if file is None or not (file.purpose == SOURCE_PURPOSE or file.purpose.startswith(PART)):
            continue
        try:
            gone += delete_file(catalogue, objects, tenant_id, file_id)
        except NotFound:
            continue
        except (StorageUnavailable, Overloaded):
            log.info("source_files_kept", first=file_id)
            break
    return gone


def delete_file(catalogue: Catalogue, objects: ObjectStore, tenant_id: str, file_id: str) -> bool:
    """Forget a file that no document and no waiting job needs, and its bytes if no other file has the same.

    False if it is still needed. Raises NotFound, StorageUnavailable (then nothing has changed)."""
    with catalogue.write() as session:
        file = session.get(File, file_id, with_for_update=True)
        if file is None or file.tenant_id != tenant_id:
            raise NotFound(f"no file {file_id!r}")
        used = select(Document.id).where(Document.file_id == file_id)
        waiting = select(JobFile.id).where(
            JobFile.file_id == file_id, JobFile.status.in_(("pending", "leased"))
        )
        kept = select(DocumentVersion.id).where(DocumentVersion.file_id == file_id)
        if any(session.scalars(query.limit(1)).first() is not None for query in (used, waiting, kept)):
            return False
        session.delete(file)
        twin = select(File.id).where(
            File.tenant_id == tenant_id, File.sha256 == file.sha256, File.id != file_id
        )
        if session.scalars(twin.limit(1)).first() is None:
            objects.delete(raw_name(tenant_id, file.sha256))
    return True
