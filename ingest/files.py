"""Uploaded files: a row each, and their bytes once per tenant under a name made of their hash."""

from __future__ import annotations

import hashlib
import time

from sqlalchemy import select

from ingest.jobs import new_id
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Document, File, JobFile
from storage.errors import NotFound, ObjectMissing
from storage.quota import check_room
from storage.types import ObjectStore

SOURCE_PURPOSE = "source"  # of files that a sync or an archive brought: they go when no document needs them


def raw_name(tenant_id: str, sha256: str) -> str:
    """The object's name. Tenants are kept apart, and their ids may hold any characters."""
    return f"raw/{owner_part(tenant_id)}/{sha256}"


def owner_part(tenant_id: str) -> str:
    """The part of the object's name that tells whose it is."""
    return hashlib.sha256(tenant_id.encode()).hexdigest()[:32]


def store_file(
    catalogue: Catalogue,
    objects: ObjectStore,
    tenant_id: str,
    filename: str,
    data: bytes,
    purpose: str = "assistants",
) -> File:
    """Store an upload. The same name with the same bytes is the same file, so that a repeated upload
    changes nothing.

    Raises StorageUnavailable, QuotaExceeded."""
    sha256 = hashlib.sha256(data).hexdigest()
    name = raw_name(tenant_id, sha256)
    if objects.size(name) != len(data):
        with catalogue.read() as session:
            check_room(session, tenant_id, len(data))
        objects.put(name, [data])
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
                bytes=len(data),
                sha256=sha256,
                purpose=purpose,
                created_at=time.time(),
            )
            session.add(file)
            session.flush()
        if objects.size(name) is None:  # a deletion came between
            objects.put(name, [data])
    return file


def read_file(objects: ObjectStore, file: File) -> bytes:
    """The bytes as they were uploaded. Raises StorageUnavailable, ObjectMissing."""
    name = raw_name(file.tenant_id, file.sha256)
    data = bytearray(file.bytes)
    read = objects.read_into(name, memoryview(data))
    if read != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
        raise ObjectMissing("the stored file is damaged; upload it again")
    return bytes(data)


def delete_file(catalogue: Catalogue, objects: ObjectStore, tenant_id: str, file_id: str) -> bool:
    """Forget a file that no document and no waiting job needs, and its bytes if no other file has the same.

    False if it is still needed. Raises NotFound, StorageUnavailable (then nothing has changed)."""
    with catalogue.write() as session:
        file = session.get(File, file_id, with_for_update=True)
        if file is None or file.tenant_id != tenant_id:
            raise NotFound(f"no file {file_id!r}")
        used = select(Document.id).where(Document.file_id == file_id).limit(1)
        waiting = select(JobFile.id).where(
            JobFile.file_id == file_id, JobFile.status.in_(("pending", "leased"))
        )
        if session.scalars(used).first() is not None or session.scalars(waiting.limit(1)).first() is not None:
            return False
        session.delete(file)
        twin = select(File.id).where(
            File.tenant_id == tenant_id, File.sha256 == file.sha256, File.id != file_id
        )
        if session.scalars(twin.limit(1)).first() is None:
            objects.delete(raw_name(tenant_id, file.sha256))
    return True
