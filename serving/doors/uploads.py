"""Uploads in parts, in the asker's name."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.files import PART, delete_file, open_file, store_file
from ingest.uploads import LIFETIME_SECONDS
from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors import files
from storage.catalogue.schema import File, Upload
from storage.errors import NotFound, UserError
from storage.quota import check_room


def create(parts: ApiParts, who: Principal, filename: str, size: int, purpose: str) -> dict[str, Any]:
    """Announce a file of `size` bytes."""
    now = parts.clock()
    upload = Upload(
        id=secrets.token_hex(12), tenant_id=who.tenant_id, filename=filename, bytes=size, purpose=purpose, status="pending",
        key_id=who.key_id, created_at=now, expires_at=now + LIFETIME_SECONDS,
    )  # fmt: skip
    with parts.catalogue.write() as session:
        session.add(upload)
        session.flush()
        return _shape(upload, None)


def add_part(parts: ApiParts, who: Principal, upload_id: str, data: BinaryIO) -> dict[str, Any]:
    """Keep a part. The same bytes again are another part, which lies in the same object: a file may repeat itself, and what
    a repeated request has added goes with the upload. Raises NotFound, UserError for an upload that has ended,
    QuotaExceeded, StorageUnavailable."""
    with parts.catalogue.read() as session:
        upload = _pending(parts, session, who, upload_id)
    file = store_file(parts.catalogue, parts.objects, who.tenant_id, f"part-{secrets.token_hex(8)}", data, PART + upload.id)
    with parts.catalogue.read() as session:
        try:
            _pending(parts, session, who, upload_id)  # a part that came too late must not stay
        except UserError:
            _drop(parts, who, [file.id])
            raise
    created = {"created_at": int(file.created_at), "upload_id": upload_id}
    return {"id": _part_id(file.id), "object": "upload.part", **created}


def complete(parts: ApiParts, who: Principal, upload_id: str, part_ids: Sequence[str], md5: str | None) -> dict[str, Any]:
    """Make the file of the parts, in this order; again it is the same file. Raises NotFound, UserError, QuotaExceeded,
    StorageUnavailable."""
    with parts.catalogue.read() as session:
        upload = find(session, who, upload_id)
        if upload.status == "completed":
            return _shape(upload, session.get(File, upload.file_id))
        upload = _pending(parts, session, who, upload_id)
        pieces = [_part(session, upload, part_id) for part_id in part_ids]
        _check(session, upload, pieces)
    with tempfile.TemporaryFile() as whole:
        _join(parts, pieces, cast(BinaryIO, whole), md5)
        file = files.store(parts, who, upload.filename, cast(BinaryIO, whole), upload.purpose)
    with parts.catalogue.write() as session:
        row = session.get_one(Upload, upload.id, with_for_update=True)
        if row.status == "pending":
            row.status, row.file_id = "completed", file.id
            session.flush()
        shown = _shape(row, session.get(File, row.file_id) if row.file_id else None)
    _drop_parts(parts, who, upload.id)
    return shown


def cancel(parts: ApiParts, who: Principal, upload_id: str) -> dict[str, Any]:
    """Give an upload up; one that has ended stays as it is. Raises NotFound."""
    with parts.catalogue.write() as session:
        upload = find(session, who, upload_id)
        if upload.status == "pending":
            upload.status = "cancelled"
        shown = _shape(upload, session.get(File, upload.file_id) if upload.file_id else None)
    _drop_parts(parts, who, upload.id)
    return shown


def find(session: Session, who: Principal, upload_id: str) -> Upload:
    """An upload by id, for the key that began it. Raises NotFound."""
    upload = session.get(Upload, upload_id.removeprefix("upload_"))
    theirs = upload is not None and (upload.tenant_id, upload.key_id) == (who.tenant_id, who.key_id)
    if upload is None or not theirs or not upload_id.startswith("upload_"):
        raise NotFound(f"No such Upload object: {upload_id!r}")
    return upload


def _pending(parts: ApiParts, session: Session, who: Principal, upload_id: str) -> Upload:
    upload = find(session, who, upload_id)
    status = "expired" if upload.status == "pending" and upload.expires_at <= parts.clock() else upload.status
    if status != "pending":
        raise UserError(f"This upload is {status}; make a new one.", code="upload_not_pending")
    return upload


def _part(session: Session, upload: Upload, part_id: str) -> File:
    file = session.get(File, f"file-{part_id.removeprefix('part_')}")
    if file is None or (file.tenant_id, file.purpose) != (upload.tenant_id, PART + upload.id):
        raise UserError(f"This upload has no part {part_id!r}.", code="invalid_part")
    return file


def _part_id(file_id: str) -> str:
    return f"part_{file_id.removeprefix('file-')}"


def _check(session: Session, upload: Upload, pieces: Sequence[File]) -> None:
    """Before anything is written: a small part must not become gigabytes. Raises UserError, QuotaExceeded."""
    if len({piece.id for piece in pieces}) < len(pieces):
        raise UserError("A part is named twice: send its bytes again for each place in the file.", code="invalid_part")
    total = sum(piece.bytes for piece in pieces)
    if total != upload.bytes:
        message = f"The parts have {total} bytes together, but {upload.bytes} were announced."
        raise UserError(message, code="invalid_upload_size")
    if len(pieces) > 1:  # a single part is in its place already
        check_room(session, upload.tenant_id, total)


def _join(parts: ApiParts, pieces: Sequence[File], whole: BinaryIO, md5: str | None) -> None:
    """Write the parts one behind the other. Raises UserError if that is not what was announced."""
    for piece in pieces:
        with open_file(parts.objects, piece) as stream:
            shutil.copyfileobj(stream, whole, 1 << 20)
    if md5 is not None:
        whole.seek(0)
        digest = hashlib.md5(usedforsecurity=False)
        while block := whole.read(1 << 20):
            digest.update(block)
        if digest.hexdigest() != md5.lower():
            raise UserError("The parts do not have the md5 that was named.", code="invalid_checksum")


def _drop_parts(parts: ApiParts, who: Principal, upload_id: str) -> None:
    with parts.catalogue.read() as session:
        of_upload = (File.tenant_id == who.tenant_id, File.purpose == PART + upload_id)
        ids = session.scalars(select(File.id).where(*of_upload)).all()
    _drop(parts, who, ids)


def _drop(parts: ApiParts, who: Principal, file_ids: Sequence[str]) -> None:
    for file_id in file_ids:
        try:
            delete_file(parts.catalogue, parts.objects, who.tenant_id, file_id)
        except NotFound:
            continue  # another request was quicker


def _shape(upload: Upload, file: File | None) -> dict[str, Any]:
    return {
        "id": f"upload_{upload.id}",
        "object": "upload",
        "bytes": upload.bytes,
        "created_at": int(upload.created_at),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.status,
        "expires_at": int(upload.expires_at),
        "file": None if file is None else files.shape(file),
    }
