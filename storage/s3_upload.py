"""Bodies on their way to S3: sent from where they lie, within a deadline; large ones in parts, whole or not at all."""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

from botocore.exceptions import BotoCoreError, ClientError

from storage.retry import DeadlinePassed, Retry

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

PART = 16 << 20  # S3 wants 5 MiB at least, and 10,000 parts at most
MULTIPART_FROM = 2 * PART


class Body(io.RawIOBase):
    """Buffers as one file, not joined. Reading fails once `end` has passed: so that ends an upload that crawls."""

    def __init__(self, parts: Sequence[bytes | memoryview], end: float) -> None:
        self._views = [memoryview(part).cast("B") for part in parts if len(part)]
        self._starts = [0, *itertools.accumulate(map(len, self._views))]
        self._end, self._at = end, 0

    def as_file(self) -> IO[bytes]:
        """This, as boto3's types want it."""
        return cast("IO[bytes]", self)

    def __len__(self) -> int:
        return self._starts[-1]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if time.monotonic() >= self._end:
            raise DeadlinePassed("the deadline has passed")
        done, target = 0, memoryview(buffer)
        while done < len(target) and self._at < len(self):
            number = bisect.bisect_right(self._starts, self._at) - 1
            inside = self._at - self._starts[number]
            piece = self._views[number][inside : inside + len(target) - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def upload_parts(
    client: S3Client, retry: Retry, bucket: str, key: str, parts: Sequence[bytes | memoryview], options: dict[str, str]
) -> None:
    """One object by multipart upload; aborted if it fails, so that nothing of it is left."""
    with_options = cast("Any", options)
    made = retry.run(lambda end: client.create_multipart_upload(Bucket=bucket, Key=key, **with_options))
    where: Any = {"Bucket": bucket, "Key": key, "UploadId": made["UploadId"]}
    try:
        sent: list[CompletedPartTypeDef] = []
        for number, piece in enumerate(_pieces(parts), 1):
            sent.append(retry.run(partial(_send, client, where, number, piece)))
        retry.run(lambda end: client.complete_multipart_upload(**where, MultipartUpload={"Parts": sent}))
    except BaseException:
        with contextlib.suppress(ClientError, BotoCoreError):  # what cannot be aborted now is swept later
            client.abort_multipart_upload(**where)
        raise


def _send(client: S3Client, where: Any, number: int, piece: Sequence[memoryview], end: float) -> CompletedPartTypeDef:
    reply = client.upload_part(**where, PartNumber=number, Body=Body(piece, end).as_file())
    return {"PartNumber": number, "ETag": reply.get("ETag", "")}


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in pieces of PART, each a list of views."""
    piece: list[memoryview] = []
    room = PART
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            taken, view = view[:room], view[room:]
            piece.append(taken)
            room -= len(taken)
            if not room:
                yield piece
                piece, room = [], PART
    if piece:
        yield piece


def abort_stale(client: S3Client, retry: Retry, bucket: str, prefix: str, older_than_s: float) -> int:
    """Abort the uploads that were begun longer ago, by the server's clock, which has dated them: their writers are dead. How
    many."""
    aborted = 0
    marks: Any = {}
    while True:
        page = retry.run(lambda end: client.list_multipart_uploads(Bucket=bucket, Prefix=prefix, **marks))  # noqa: B023
        date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
        limit = (parsedate_to_datetime(date) if date else datetime.now(UTC)) - timedelta(seconds=older_than_s)
        for upload in page.get("Uploads", ()):
            if upload["Initiated"] <= limit:
                with contextlib.suppress(client.exceptions.NoSuchUpload):  # its writer, or another sweep, was faster
                    client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                    aborted += 1
        if not page.get("IsTruncated"):
            return aborted
        marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
