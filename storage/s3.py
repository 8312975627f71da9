"""Objects in an S3 bucket. The only file that knows boto3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError, ReadTimeoutError
from urllib3.exceptions import HTTPError

from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable
from storage.names import check_name, check_prefix, is_name

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.literals import BucketLocationConstraintType
    from mypy_boto3_s3.type_defs import CreateBucketConfigurationTypeDef

_PIECE = 1 << 20  # the stream copies what it reads once; a piece this large stays in the processor's cache

# Foreign error -> ours; the first row that fits. Messages carry the class or the server's code, no more.
_ERRORS: tuple[tuple[type[Exception], type[StorageUnavailable]], ...] = (
    (ReadTimeoutError, StorageTimeout),
    (ConnectTimeoutError, StorageTimeout),
    (TimeoutError, StorageTimeout),
    (ClientError, StorageUnavailable),
    (BotoCoreError, StorageUnavailable),
    (HTTPError, StorageUnavailable),
    (OSError, StorageUnavailable),
)
_FOREIGN = tuple(row[0] for row in _ERRORS)
_MISSING_CODES = frozenset({"NoSuchKey", "404", "NotFound"})  # a HEAD has no body, so no name for its 404
_RANGE_CODES = frozenset({"InvalidRange", "416"})


class S3Store:
    """An ObjectStore in one bucket, all names below `prefix`. Safe to share between threads.

    Refused or unanswered requests are tried `attempts` times in all, with growing random pauses. Without
    keys, the environment's own credentials are used.
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
        attempts: int = 4,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 10.0,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{check_name(prefix)}/" if prefix else ""
        self._region = region
        config = Config(
            s3={"addressing_style": "path", "payload_signing_enabled": False},  # objects carry their digests
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "total_max_attempts": attempts},
            connect_timeout=connect_timeout_s,
            read_timeout=read_timeout_s,
            max_pool_connections=32,
        )
        self._client: S3Client = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            region_name=region,
            config=config,
        )

    def ensure_bucket(self) -> None:
        """Creates the bucket where there is none. Raises StorageUnavailable."""
        with self._mapped("open", self._bucket):
            try:
                self._client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if _code(error) not in _MISSING_CODES:
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
            if _code(error) not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise
            self._client.head_bucket(Bucket=self._bucket)  # another process was faster, or it is not ours

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """See ObjectStore. One request, so at most 5 GB; the parts are joined in memory."""
        body = b"".join(parts)
        with self._mapped("put", name):
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=body)
        return len(body)

    def size(self, name: str) -> int | None:
        """See ObjectStore."""
        with self._mapped("size", name):
            try:
                return self._client.head_object(Bucket=self._bucket, Key=self._key(name))["ContentLength"]
            except ClientError as error:
                if _code(error) in _MISSING_CODES:
                    return None
                raise

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """See ObjectStore."""
        if not len(buffer):
            return self._read_nothing(name)
        wanted = f"bytes={offset}-{offset + len(buffer) - 1}"
        with self._mapped("read", name):
            try:
                reply = self._client.get_object(Bucket=self._bucket, Key=self._key(name), Range=wanted)
            except ClientError as error:
                if _code(error) in _RANGE_CODES:
                    return 0  # the object ends before `offset`
                raise
            with contextlib.closing(reply["Body"]) as body:
                if offset and not reply.get("ContentRange", "").startswith(f"bytes {offset}-"):
                    raise StorageUnavailable(f"object store: read {name}: the server ignored the range")
                return _drain(body, buffer)

    def _read_nothing(self, name: str) -> int:
        if self.size(name) is None:
            raise ObjectMissing(f"no object {name}")
        return 0

    def delete(self, name: str) -> bool:
        """See ObjectStore. Two requests: S3 itself does not say whether there was anything to delete."""
        existed = self.size(name) is not None
        if existed:
            with self._mapped("delete", name):
                self._client.delete_object(Bucket=self._bucket, Key=self._key(name))
        return existed

    def list(self, prefix: str) -> Iterator[str]:
        """See ObjectStore. In the order of their names, a thousand to a request."""
        pages = self._client.get_paginator("list_objects_v2")
        start = self._prefix + check_prefix(prefix)
        with self._mapped("list", prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=start):
                names = (row["Key"].removeprefix(self._prefix) for row in page.get("Contents", ()))
                yield from filter(is_name, names)

    def close(self) -> None:
        """Closes the pooled connections."""
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    @contextlib.contextmanager
    def _mapped(self, action: str, name: str) -> Iterator[None]:
        try:
            yield
        except _FOREIGN as error:
            code = _code(error)
            if code in _MISSING_CODES and action == "read":
                raise ObjectMissing(f"no object {name}") from None
            ours = next(ours for foreign, ours in _ERRORS if isinstance(error, foreign))
            # `from None`: a server's or a library's message may quote the request, headers and all.
            raise ours(f"object store: {action} {name}: {code or type(error).__name__}") from None


def _drain(body: StreamingBody, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = body.readinto(buffer[done : done + _PIECE])  # type: ignore[arg-type]  # any buffer will do
        if not count:
            break
        done += count
    return done


def _code(error: Exception) -> str | None:
    return str(error.response.get("Error", {}).get("Code")) if isinstance(error, ClientError) else None
