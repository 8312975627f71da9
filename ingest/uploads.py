"""Uploads in parts. A part is a file of its own, which no list shows, until the upload is completed, cancelled or too old."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.files import PART
from storage.catalogue.schema import File, Upload

LIFETIME_SECONDS = 3600.0  # OpenAI's


def expire(session: Session, now: float) -> int:
    """Give up on uploads that nobody completed in time. Their parts' rows go; the bytes are orphans then, and collected."""
    late = select(Upload).where(Upload.status == "pending", Upload.expires_at <= now).with_for_update(skip_locked=True)
    uploads = session.scalars(late).all()
    for upload in uploads:
        upload.status = "expired"
        session.execute(delete(File).where(File.tenant_id == upload.tenant_id, File.purpose == PART + upload.id))
    return len(uploads)
