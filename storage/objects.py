"""Which object store a URL means."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from storage.errors import UserError
from storage.folder import FolderStore
from storage.names import is_name
from storage.types import ObjectStore

_SSE = re.compile("sse=(AES256|aws:kms)")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def open_store(
    url: str,
    *,
    s3_endpoint: str | None = None,
    s3_access_key: str | None = None,
    s3_secret_key: str | None = None,
    s3_region: str = "us-east-1",
) -> ObjectStore:
    """The store at `file:///folder`, a plain path or `s3://bucket/prefix`; folder or bucket is made.

    `s3://bucket/prefix?sse=AES256` (or `aws:kms`) has the server encrypt what is stored from now on.
    Raises UserError for a URL that means none of these, StorageUnavailable where the store is not to be had.
    """
    if "://" not in url:
        if not url:
            raise UserError("the object store's address is empty; give a folder or s3://bucket/prefix")
        return FolderStore(os.path.expanduser(url))
    parts = urlsplit(url)
    sse = _SSE.fullmatch(parts.query) if parts.scheme == "s3" else None
    if (parts.query and not sse) or parts.fragment or "@" in parts.netloc:
        raise UserError(
            "the object store's address may hold no keys, no `#` and no `?` but ?sse=AES256 or "
            "?sse=aws:kms for S3; set the S3 keys apart"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or len(parts.path) < 2:
            raise UserError(f"{url!r} is no folder of this machine; write file:///folder with three slashes")
        return FolderStore(unquote(parts.path))
    if parts.scheme != "s3":
        raise UserError(f"unknown object store {parts.scheme}://; give a folder or s3://bucket/prefix")
    place = parts.netloc, parts.path.strip("/"), sse[1] if sse else None
    return _open_s3(*place, s3_endpoint, s3_access_key, s3_secret_key, s3_region)


def _open_s3(
    bucket: str,
    prefix: str,
    encryption: str | None,
    endpoint: str | None,
    access_key: str | None,
    secret_key: str | None,
    region: str,
) -> ObjectStore:
    from storage.s3 import S3Store  # boto3 takes half a second to import; a folder needs none of it

    if not _BUCKET.fullmatch(bucket):
        raise UserError(f"{bucket!r} is no bucket name: 3 to 63 lower-case letters, digits, dots and dashes")
    if prefix and not is_name(prefix):
        raise UserError(f"{prefix!r} cannot be a prefix: ASCII letters, digits and _ . - between slashes")
    if bool(access_key) != bool(secret_key):
        raise UserError("only one of the two S3 keys is set; set both, or neither to use the environment's")
    store = S3Store(
        bucket,
        prefix,
        endpoint=endpoint or None,
        access_key=access_key or None,
        secret_key=secret_key or None,
        region=region,
        encryption=encryption,
    )
    store.ensure_bucket()
    return store
