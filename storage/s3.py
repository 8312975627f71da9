"""Objects in an S3 bucket. Reading is plain HTTP (`s3_http.py`), all else goes through boto3."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from storage.breaker import Breaker
from storage.errors import ObjectMissing
from storage.names import check_name, check_prefix, is_name
from storage.retry import Retry
from storage.s3_errors import MISSING_CODES, TAKEN_CODES, code_of, is_trouble, mapped
from storage.s3_http import Got, Misanswered, Refused, S3Http
from storage.s3_sign import Signer
from storage.s3_upload import MULTIPART_FROM, Body, abort_stale, upload_parts
from storage.spread import spread
from storage.types import ObjectInfo

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.literals import BucketLocationConstraintType
    from mypy_boto3_s3.type_defs import CreateBucketConfigurationTypeDef

STALE_SECONDS = 24 * 3600.0  # an upload that was begun a day ago has no writer any more
DELETES = 1000  # names to a request, as S3 allows
# Larger reads are split. Where a connection gives 50 MB/s, 16 MiB is as fast as less and takes less CPU, and 32 is slower.
RANGE = 16 << 20
READERS = 4  # threads for one split read, the caller's among them
MAX_READERS = 16  # more threads than callers, all split reads together
_SIGNED_S = 3600  # each URL is signed for one attempt; this much may our clock be late


class S3Store:
    """An ObjectStore in one bucket, all names below `prefix`. Safe to share between threads.

    Requests that meet the server's trouble are tried `attempts` times in all, within `deadline_s`; after several
    requests in vain the server is left alone for some seconds (`storage/breaker.py`). Without keys, the environment's
    own credentials are used. `encryption`: what the server is asked to encrypt with, "AES256" or "aws:kms".
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        region: str = "us-east-1",
        encryption: str | None = None,
        attempts: int = 4,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 10.0,
        deadline_s: float = 60.0,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{check_name(prefix)}/" if prefix else ""
        self._region = region
        self._options = {"ServerSideEncryption": encryption} if encryption else {}
        self._retry = Retry(is_trouble, Breaker(), attempts=attempts, deadline_s=deadline_s)
        self._http = S3Http(connect_timeout_s, read_timeout_s)
        self._spare_readers = threading.BoundedSemaphore(MAX_READERS)
        config = Config(
            signature_version="s3v4",  # for signed URLs boto3 would still choose version 2
            s3={"addressing_style": "path", "payload_signing_enabled": False},  # objects carry their digests
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "total_max_attempts": 1},  # `Retry` does it
            connect_timeout=connect_timeout_s,
            read_timeout=read_timeout_s,
            max_pool_connections=32,
        )
        session = boto3.session.Session(access_key, secret_key, region_name=region)
        self._client: S3Client = session.client("s3", endpoint_url=endpoint, config=config)
        self._signer = Signer(self._client, session.get_credentials(), bucket, region, _SIGNED_S)

    def ensure_bucket(self) -> None:
        """Creates the bucket where there is none. Raises StorageUnavailable."""
        with mapped("open", self._bucket):
            try:
                self._retry.run(lambda end: self._client.head_bucket(Bucket=self._bucket))
            except ClientError as error:
                if code_of(error) not in MISSING_CODES:
                    raise
                self._create_bucket()

    def _create_bucket(self) -> None:
        try:
            if self._region == "us-east-1":  # the one region whose name S3 refuses here
                self._client.create_bucket(Bucket=self._bucket)
            else:
                place = cast("BucketLocationConstraintType", self._region)
                configuration: CreateBucketConfigurationTypeDef = {"LocationConstraint": place}
                self._client.create_bucket(Bucket=self._bucket, CreateBucketConfiguration=configuration)
        except ClientError as error:
            if code_of(error) not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise
            self._client.head_bucket(Bucket=self._bucket)  # another process was faster, or it is not ours

    # --- writing -----------------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """See ObjectStore. From 32 MiB on a multipart upload, so at most 156 GiB."""
        key, size = self._key(name), sum(map(len, parts))
        with mapped("put", name):
            if size >= MULTIPART_FROM:
                upload_parts(self._client, self._retry, self._bucket, key, parts, self._options)
            else:
                self._retry.run(
                    lambda end: self._client.put_object(
                        Bucket=self._bucket, Key=key, Body=Body(parts, end).as_file(), **cast("Any", self._options)
                    )
                )
        return size

    def put_new(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """See ObjectStore. By If-None-Match, which a server may not know: then two writers may believe that they were first."""
        key = self._key(name)
        with mapped("put", name):
            try:
                self._retry.run(
                    lambda end: self._client.put_object(
                        Bucket=self._bucket, Key=key, Body=Body(parts, end).as_file(), IfNoneMatch="*",
                        **cast("Any", self._options),
                    )
                )  # fmt: skip
            except ClientError as error:
                if code_of(error) not in TAKEN_CODES:
                    raise
                return False
        return True

    def delete(self, name: str) -> bool:
        """See ObjectStore. Two requests: S3 itself does not say whether there was anything to delete."""
        existed = self.size(name) is not None
        if existed:
            with mapped("delete", name):
                self._retry.run(lambda end: self._client.delete_object(Bucket=self._bucket, Key=self._key(name)))
        return existed

    def delete_many(self, names: Sequence[str]) -> dict[str, str]:
        """See ObjectStore. A thousand to a request."""
        left: dict[str, str] = {}
        for some in (names[i : i + DELETES] for i in range(0, len(names), DELETES)):
            keys = [{"Key": self._key(name)} for name in some]
            with mapped("delete", f"{len(some)} objects"):
                reply = self._retry.run(
                    lambda end: self._client.delete_objects(
                        Bucket=self._bucket,
                        Delete=cast("Any", {"Objects": keys, "Quiet": True}),  # noqa: B023
                    )
                )
            for error in reply.get("Errors", ()):
                if error.get("Code") not in MISSING_CODES:
                    left[error.get("Key", "").removeprefix(self._prefix)] = error.get("Code", "unknown")
        return left

    def sweep(self, older_than_s: float = STALE_SECONDS) -> int:
        """See ObjectStore: aborts the multipart uploads of writers that died."""
        with mapped("sweep", self._bucket):
            return abort_stale(self._client, self._retry, self._bucket, self._prefix, older_than_s)

    # --- reading -----------------------------------------------------------------------------------------

    def size(self, name: str) -> int | None:
        """See ObjectStore."""
        key = self._key(name)
        with mapped("size", name):
            try:
                return self._retry.run(lambda end: self._http.size(self._signer.url("HEAD", key), end))
            except Refused as error:
                if error.code in MISSING_CODES:
                    return None
                raise

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """See ObjectStore. A large range by several requests at once."""
        if not len(buffer):
            return self._read_nothing(name)
        key = self._key(name)
        with mapped("read", name):
            return self._count(self._get_split(key, buffer, offset))

    def read_all(self, name: str, allocate: Callable[[int], memoryview]) -> int:
        """See ObjectStore. One request tells the size and brings the first 16 MiB; the rest comes by several at once."""
        key = self._key(name)
        with mapped("read", name):
            first, buffer = self._retry.run(
                lambda end: self._http.get_first(self._signer.url("GET", key), RANGE, allocate, end)
            )
            rest = self._get_split(key, buffer[first.count :], first.count) if first.count < first.total else []
            return self._count([first, *rest])

    def _get_split(self, key: str, buffer: memoryview, offset: int) -> Sequence[Got]:
        pieces = [(offset + at, buffer[at : at + RANGE]) for at in range(0, len(buffer), RANGE)]
        if len(pieces) == 1:
            return [self._get(key, offset, buffer)]
        return spread(lambda piece: self._get(key, *piece), pieces, self._spare_readers, READERS)

    def _count(self, got: Sequence[Got]) -> int:
        if len({each.etag for each in got if each.count}) > 1:
            raise Misanswered("the object changed while it was read")
        return sum(each.count for each in got)

    def _get(self, key: str, offset: int, buffer: memoryview) -> Got:
        return self._retry.run(lambda end: self._http.get(self._signer.url("GET", key), buffer, offset, end))

    def _read_nothing(self, name: str) -> int:
        if self.size(name) is None:
            raise ObjectMissing(f"no object {name}")
        return 0

    def list(self, prefix: str) -> Iterator[str]:
        """See ObjectStore. In the order of their names, a thousand to a request."""
        return (info.name for info in self.entries(prefix))

    def entries(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ObjectStore. In the order of their names, a thousand to a request."""
        more: dict[str, Any] = {"Prefix": self._prefix + check_prefix(prefix)}
        while True:
            with mapped("list", prefix):
                page = self._retry.run(lambda end: self._client.list_objects_v2(Bucket=self._bucket, **more))
            for row in page.get("Contents", ()):
                if is_name(name := row["Key"].removeprefix(self._prefix)):
                    yield ObjectInfo(name, row["Size"], row["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            more["ContinuationToken"] = page["NextContinuationToken"]

    def counters(self) -> dict[str, int]:
        """requests, retries, failures, and the breaker's: breaker_open, breaker_opened, breaker_refused."""
        return self._retry.counters()

    def close(self) -> None:
        """Closes the pooled connections."""
        self._http.close()
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)
