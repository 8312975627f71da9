"""What goes wrong with S3, in our words: one table from foreign errors to ours, and which of them another try may not meet."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Iterator
from typing import Any, cast

import botocore.exceptions as boto
from urllib3.exceptions import HTTPError

from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable
from storage.retry import DeadlinePassed
from storage.s3_http import Misanswered, Refused, seconds_ahead

# Foreign error -> ours; the first row that fits. Messages carry the class or the server's code, no more.
_ERRORS: tuple[tuple[type[Exception], type[StorageUnavailable]], ...] = (
    (boto.ReadTimeoutError, StorageTimeout),
    (boto.ConnectTimeoutError, StorageTimeout),
    (TimeoutError, StorageTimeout),
    (Refused, StorageUnavailable),
    (boto.ClientError, StorageUnavailable),
    (boto.BotoCoreError, StorageUnavailable),
    (HTTPError, StorageUnavailable),
    (http.client.HTTPException, StorageUnavailable),
    (OSError, StorageUnavailable),
)
FOREIGN = tuple(row[0] for row in _ERRORS)
MISSING_CODES = frozenset({"NoSuchKey", "404", "NotFound"})  # a HEAD has no body, so no name for its 404
# What a write on the condition that there is no such object meets: there is one, or another write of it is at work.
TAKEN_CODES = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})
_BUSY_CODES = frozenset({"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "InternalError"})
_UNANSWERED = (boto.HTTPClientError, boto.ConnectionError, HTTPError, http.client.HTTPException, OSError)
SKEW_S = 300.0  # servers allow 15 minutes; a clock that is off by five explains a refusal


def code_of(error: Exception) -> str | None:
    """S3's name for a refusal, or its HTTP status; None if the server has not answered."""
    if isinstance(error, Refused):
        return error.code
    return str(error.response.get("Error", {}).get("Code")) if isinstance(error, boto.ClientError) else None


def is_trouble(error: Exception) -> bool:
    """Whether it is the server's or the network's trouble, and not a refusal of this very request."""
    if isinstance(error, (Refused, boto.ClientError)):
        status = error.status if isinstance(error, Refused) else _metadata(error).get("HTTPStatusCode", 0)
        return status in (408, 429) or status >= 500 or code_of(error) in _BUSY_CODES
    return isinstance(error, _UNANSWERED) and not isinstance(error, ssl.SSLCertVerificationError)


@contextlib.contextmanager
def mapped(action: str, name: str) -> Iterator[None]:
    """The one place where foreign errors become ours."""
    try:
        yield
    except FOREIGN as error:
        code = code_of(error)
        if code in MISSING_CODES and action == "read":
            raise ObjectMissing(f"no object {name}") from None
        ours = next(ours for foreign, ours in _ERRORS if isinstance(error, foreign))
        # `from None`: a server's or a library's message may quote the request, headers and all.
        own = str(error) if isinstance(error, (Misanswered, DeadlinePassed)) else None
        reason = f"{own or code or type(error).__name__}{_clock(error, code)}"
        raise ours(f"object store: {action} {name}: {reason}") from None


def _clock(error: Exception, code: str | None) -> str:
    """The likely reason of a refusal, where this machine's clock and the server's differ."""
    if isinstance(error, Refused):
        refused, date = error.status == 403, error.date
    elif isinstance(error, boto.ClientError):
        refused, date = _metadata(error).get("HTTPStatusCode") == 403, _metadata(error).get("HTTPHeaders", {}).get("date")
    else:
        return ""
    ahead = seconds_ahead(date) if refused or code == "RequestTimeTooSkewed" else 0.0
    if abs(ahead) < SKEW_S:
        return ""
    return f" (this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's)"


def _metadata(error: boto.ClientError) -> dict[str, Any]:
    return cast("dict[str, Any]", error.response.get("ResponseMetadata", {}))
