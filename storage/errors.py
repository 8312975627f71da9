"""The error tree. A refusal is raised; a cache miss is a value (`types.Miss`).

PrereadError
├── UserError            the caller's mistake: one clear line that says what to do
│   ├── NotFound         unknown, or not the caller's to see: the two look alike
│   ├── PathClosed       a path that the caller may not write to
│   └── FileError        one file could not be read; `code` is from the closed list of job error codes
│       └── QuotaExceeded  the tenant has no room left for it
├── StorageUnavailable   the store refused, or failed; retryable
│   └── StorageTimeout   it did not answer in time
├── ObjectMissing        no object of that name
│   └── ObjectDamaged    there is one, but not what was stored
├── Overloaded           too much work waits already; retryable
├── EngineUnavailable    the process that computes answers is not there, or failed; retryable
├── ModelUnsupported     the model's state cannot be blended, or not be loaded
├── Cancelled            the work was told to stop
└── Stopping             this process is about to end: another one does it, or this one started again; retryable
"""

from __future__ import annotations

FILE_ERROR_CODES = frozenset(
    "unsupported_file invalid_file empty_file no_text_extracted password_required ocr_required too_large archive_limit "
    "encoding_unknown parser_timeout parser_crash embedding_failed kv_failed storage_error cancelled worker_lost "
    "insufficient_quota".split()
)


class PrereadError(Exception):
    """Base of all errors raised on purpose. `str(error)` is fit for the person who caused it."""

    code = "internal_error"
    retryable = False

    def __init__(self, message: str, *, code: str | None = None, retryable: bool | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable


class UserError(PrereadError):
    """The request cannot be served as it stands."""

    code = "invalid_request"


class NotFound(UserError):
    """No such thing for this caller."""

    code = "not_found"


class PathClosed(UserError):
    """What is at this path is not open to the caller, so that they may not replace it either."""

    code = "path_closed"

    def __init__(self, path: str) -> None:
        super().__init__(f"You may not write to the path {path!r}: use another one.")


class FileError(UserError):
    """A file that cannot be ingested; `code` is one of FILE_ERROR_CODES."""

    code = "invalid_file"


class QuotaExceeded(FileError):
    """The tenant's stored bytes have reached its limit; the message names both."""

    code = "insufficient_quota"


class StorageUnavailable(PrereadError):
    """The object store refused, failed, or (see StorageTimeout) did not answer."""

    code = "storage_error"
    retryable = True


class StorageTimeout(StorageUnavailable):
    """The object store did not answer in time."""


class ObjectMissing(PrereadError):
    """No object of that name in the store."""

    code = "object_missing"


class ObjectDamaged(ObjectMissing):
    """What lies under that name is not what was stored there."""


class ModelUnsupported(PrereadError):
    """The model cannot be loaded, or its state cannot be blended; the message says why."""

    code = "model_unsupported"


class Cancelled(PrereadError):
    """The work read its cancel flag."""

    code = "cancelled"


class Overloaded(PrereadError):
    """Too much work waits already; try again later. `retry_after`: seconds, where they can be told."""

    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailable(PrereadError):
    """Another process computes the answers, and it does not answer, or not to the end."""

    code = "engine_unavailable"
    retryable = True


class Stopping(PrereadError):
    """This process has been told to end. The work can be had from another one, or from this one when it is back."""

    code = "stopping"
    retryable = True

    def __init__(self, message: str = "The server is being stopped; try again in a few seconds.") -> None:
        super().__init__(message)
