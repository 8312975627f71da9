"""Where files come from. One file per kind of source, and one line in the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ingest.sources.credentials import Credential, read_credential
from ingest.sources.folder import FolderSource
from ingest.sources.git import GitSource
from ingest.sources.http_list import HttpListSource
from ingest.sources.types import FILE_BYTES, Asker, Entry, Left, Reach, Seen, Source
from storage.errors import UserError

__all__ = ["FILE_BYTES", "KINDS", "Asker", "Entry", "FolderSource", "GitSource", "Left", "Reach", "Seen", "Source", "open_source"]
Spec = Mapping[str, Any]


def open_source(spec: Spec, reach: Reach, asker: Asker) -> Source:
    """The source that a corpus names. Nothing is fetched yet. Raises UserError for what it may not read."""
    opener = KINDS.get(str(spec.get("type")))
    if opener is None:
        raise UserError(f'a source has a "type": {", ".join(KINDS)}')
    return opener(spec, reach, asker)


def _folder(spec: Spec, reach: Reach, asker: Asker) -> Source:
    return FolderSource(_inside(_text(spec, "path"), reach), check=asker.check)


def _git(spec: Spec, reach: Reach, asker: Asker) -> Source:
    if spec.get("url") and not spec.get("path"):
        from ingest.sources.git_remote import RemoteGitSource

        url = _text(spec, "url")
        return RemoteGitSource(url, _text(spec, "ref", "HEAD"), reach, asker, _credential(spec, reach, asker, url))
    return GitSource(_inside(_text(spec, "path"), reach), _text(spec, "ref", "HEAD"), check=asker.check)


def _s3(spec: Spec, reach: Reach, asker: Asker) -> Source:
    from ingest.sources.s3 import Bucket, S3Source  # botocore takes half a second to import

    endpoint = _text(spec, "endpoint") if spec.get("endpoint") else ""
    bucket = Bucket.parse(_text(spec, "url"), endpoint, _text(spec, "region", "us-east-1"))
    return S3Source(bucket, reach, asker, _credential(spec, reach, asker, bucket.url))


def _http(spec: Spec, reach: Reach, asker: Asker) -> Source:
    url = _text(spec, "url")
    return HttpListSource(url, reach, asker, _credential(spec, reach, asker, url))


# Each raises UserError for words that name nothing it may read.
KINDS: Mapping[str, Callable[[Spec, Reach, Asker], Source]] = MappingProxyType(
    {"folder": _folder, "git": _git, "s3": _s3, "http": _http}
)


def _text(spec: Spec, name: str, default: str = "") -> str:
    value = spec.get(name) or default
    if not isinstance(value, str) or not value:
        raise UserError(f'a source of type {spec["type"]!r} needs a text as its "{name}"')
    return value


def _credential(spec: Spec, reach: Reach, asker: Asker, url: str) -> Credential | None:
    if not spec.get("credential"):
        return None
    return read_credential(reach.credentials, _text(spec, "credential"), asker.tenant_id, url)


def _inside(path: str, reach: Reach) -> str:
    """The real path, links resolved, if it lies under a folder the operator allows."""
    try:
        real = os.path.realpath(path)
    except ValueError:
        raise UserError("a path holds no NUL") from None
    allowed = [os.path.realpath(root) for root in reach.roots if root]
    if not any(os.path.commonpath([root, real]) == root for root in allowed):
        raise UserError(f"the source {path!r} is not in a folder that this server may read (PREREAD_SOURCE_ROOTS)")
    return real
