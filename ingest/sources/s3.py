"""A prefix of an S3 bucket as a source, read with credentials of its own.

botocore only signs URLs; what is fetched goes through the one door, so that an endpoint is checked like any other host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote_plus
from xml.etree import ElementTree

import boto3
import botocore
from botocore.config import Config

from ingest.fetch import FetchFailed
from ingest.sources.credentials import Credential
from ingest.sources.shelf import Shelf
from ingest.sources.types import FILE_BYTES, Asker, Entry, Left, Reach, Seen
from storage.errors import StorageUnavailable, UserError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MOST_FILES = 200_000
_PAGE_BYTES = 16 << 20  # of a listing's answer: a thousand keys of 1,024 bytes, escaped, and more
_SIGNED_SECONDS = 900
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Bucket:
    """Where the objects are. `prefix` is empty or ends in a slash."""

    name: str
    prefix: str
    endpoint: str
    region: str

    @classmethod
    def parse(cls, url: str, endpoint: str, region: str) -> Bucket:
        """From s3://bucket/prefix. Raises UserError. An empty endpoint is that of AWS in the region."""
        found = _URL.fullmatch(url)
        if found is None or not re.fullmatch(r"[a-z0-9-]{1,40}", region):
            raise UserError("an S3 source is s3://bucket/prefix in a region such as eu-central-1")
        prefix = (found[2] or "").rstrip("/")
        place = endpoint.rstrip("/") or f"https://s3.{region}.amazonaws.com"
        return cls(found[1], f"{prefix}/" if prefix else "", place, region)

    @property
    def url(self) -> str:
        """The address under which it is reached, and which a credential must cover."""
        return f"{self.endpoint}/{self.name}"


class S3Source:
    """The objects below a prefix. One whose ETag and size are as they were the last time is not fetched."""

    def __init__(
        self, bucket: Bucket, reach: Reach, asker: Asker, credential: Credential | None = None, *, file_bytes: int = FILE_BYTES
    ) -> None:
        reach.hosts.check(bucket.url)
        self._bucket, self._asker, self._cap = bucket, asker, file_bytes
        self._shelf = Shelf(reach, asker, file_bytes)
        self._client = _client(bucket, credential)
        self.skipped: list[Left] = self._shelf.skipped
        self.seen: dict[str, Seen] = self._shelf.seen

    def manifest(self) -> list[Entry]:
        """See Source. Raises FetchFailed, HostRefused, StorageUnavailable, UserError."""
        for number, (key, tag, size) in enumerate(self._listed()):
            if number >= MOST_FILES:
                raise UserError(f"there are more than {MOST_FILES} objects below this prefix; name a longer one")
            self._asker.check()
            self._offer(key, tag, size)
        return sorted(self._shelf.entries.values(), key=lambda entry: entry.path)

    def read(self, path: str) -> bytes:
        """See Source."""
        kept = self._shelf.kept(path)
        return kept if kept is not None else self._shelf.same(path, self._shelf.get(self._object(path)).body)

    def close(self) -> None:
        """See Source."""
        self._shelf.close()
        self._client.close()

    def _offer(self, key: str, tag: str, size: int) -> None:
        path = key.removeprefix(self._bucket.prefix)
        seen = self._asker.seen.get(path)
        if path.endswith("/") and not size:
            return  # what consoles make to show a folder
        if any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
            self.skipped.append(Left(path, "its key is no path"))
        elif size > self._cap:
            self.skipped.append(Left(path, f"larger than {self._cap} bytes"))
        elif seen is not None and seen.tag == tag:
            self._shelf.known(path, seen)
        else:
            try:
                self._shelf.put(path, tag, self._shelf.get(self._object(path)).body)
            except (UserError, StorageUnavailable) as error:
                self._shelf.failed(path, error)

    def _listed(self) -> Iterator[tuple[str, str, int]]:
        """Every object's key, tag and size, a thousand to a request."""
        more: dict[str, Any] = {}
        while True:
            where = {"Bucket": self._bucket.name, "Prefix": self._bucket.prefix, "EncodingType": "url", **more}
            page = _parsed(self._shelf.get(self._signed("list_objects_v2", where), max_bytes=_PAGE_BYTES).body)
            for row in _all(page, "Contents"):
                yield unquote_plus(_text(row, "Key")), f"{_text(row, 'ETag')} {_text(row, 'Size')}", int(_text(row, "Size"))
            if _text(page, "IsTruncated") != "true":
                return
            if (token := _text(page, "NextContinuationToken")) in ("", more.get("ContinuationToken")):
                raise FetchFailed("the server's listing does not go on")
            more = {"ContinuationToken": token}

    def _object(self, path: str) -> str:
        return self._signed("get_object", {"Bucket": self._bucket.name, "Key": self._bucket.prefix + path})

    def _signed(self, method: Literal["get_object", "list_objects_v2"], what: dict[str, Any]) -> str:
        return str(self._client.generate_presigned_url(method, Params=what, ExpiresIn=_SIGNED_SECONDS))


def _client(bucket: Bucket, credential: Credential | None) -> S3Client:
    """A client that signs, or for a public bucket does not; it never connects. The environment's credentials are not used."""
    config = Config(signature_version="s3v4" if credential else botocore.UNSIGNED, s3={"addressing_style": "path"})
    return boto3.session.Session().client(
        "s3",
        region_name=bucket.region,
        endpoint_url=bucket.endpoint,
        aws_access_key_id=credential.username if credential else None,
        aws_secret_access_key=credential.password if credential else None,
        config=config,
    )


def _parsed(body: bytes) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        raise FetchFailed("the server's listing is no XML") from None
    if not root.tag.endswith("ListBucketResult"):
        raise FetchFailed("the server answered with no listing")
    return root


def _all(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """Its children of that name, in whatever namespace: stores differ."""
    return [child for child in element if child.tag.rpartition("}")[2] == name]


def _text(element: ElementTree.Element, name: str) -> str:
    found = _all(element, name)
    return (found[0].text or "") if found else ""
