"""Every refusal in OpenAI's shape: one table from the error tree to status, type and headers."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException

from serving.api.bodies import refusal
from serving.auth import Forbidden, Unauthorized
from storage.errors import (
    Cancelled,
    EngineUnavailable,
    FileError,
    ModelUnsupported,
    NotFound,
    Overloaded,
    PathClosed,
    PrereadError,
    QuotaExceeded,
    Stopping,
    StorageUnavailable,
    UserError,
)

log = structlog.get_logger(__name__)

# First match wins. (error, status, type, headers)
TABLE: tuple[tuple[type[PrereadError], int, str, dict[str, str]], ...] = (
    (Unauthorized, 401, "authentication_error", {"www-authenticate": "Bearer"}),
    (Forbidden, 403, "permission_error", {}),
    (PathClosed, 403, "permission_error", {}),
    (NotFound, 404, "invalid_request_error", {}),
    # OpenAI's own answer to this; a client must not try again by itself.
    (QuotaExceeded, 429, "insufficient_quota", {"x-should-retry": "false"}),
    (FileError, 400, "invalid_request_error", {}),
    (UserError, 400, "invalid_request_error", {}),
    (Overloaded, 429, "rate_limit_error", {"retry-after": "2"}),
    (StorageUnavailable, 503, "server_error", {"retry-after": "5"}),
    (Stopping, 503, "server_error", {"retry-after": "5"}),
    (EngineUnavailable, 503, "server_error", {"retry-after": "5"}),
    (ModelUnsupported, 503, "server_error", {"retry-after": "60"}),
    # A client library repeats a 409 unless told not to.
    (Cancelled, 409, "invalid_request_error", {"x-should-retry": "false"}),
)
_INTERNAL = (500, "server_error", {"x-should-retry": "false"})
_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed", 413: "request_too_large"}


class BadParameter(UserError):
    """A field of the request that cannot be served as it stands."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message, code=code)
        self.param = param


def describe(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an error. What was not raised on purpose shows nothing of itself."""
    if isinstance(error, UnicodeEncodeError | PydanticSerializationError) and "surrogates not allowed" in str(error):
        error = UserError("The request holds half a character: a surrogate without its other half.")
    status, kind, headers = next((row[1:] for row in TABLE if isinstance(error, row[0])), _INTERNAL)
    if not isinstance(error, PrereadError) or status == 500:
        log_failure(error)
        return (
            status,
            error_body(f"The server had an error; it has been logged{_as_request()}.", kind, None, "internal_error"),
            headers,
        )
    headers = {**headers, **getattr(error, "headers", {})}
    if isinstance(error, Overloaded) and error.retry_after is not None:
        headers = {**headers, "retry-after": str(error.retry_after)}
    return status, error_body(str(error), kind, getattr(error, "param", None) or None, error.code), headers


def _as_request() -> str:
    """By what the operator finds it: users copy the message, and seldom the header."""
    request_id = structlog.contextvars.get_contextvars().get("request_id")
    return f" as request {request_id}" if request_id else ""


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    """The answer to a request that ended in `error`."""
    status, body, headers = describe(error)
    return JSONResponse(body, status, headers)


def http_error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The answer for what HTTP itself refuses."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(error_body(message, kind, None, _HTTP_CODES.get(status)), status, headers)


def log_failure(error: BaseException) -> None:
    """Log an error's type and place, never its message: that may hold a document's text."""
    places, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}:{code.co_name}")
        trace = trace.tb_next
    log.error("failure", error=type(error).__name__, at=places[-8:])


def install(app: FastAPI) -> None:
    """Answer all errors of the routes in OpenAI's shape."""
    app.add_exception_handler(PrereadError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's 422 as OpenAI's 400, naming the first field that is wrong."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        return error_response(UserError(f"The body is not valid JSON: {first['ctx']['error']}.", code="invalid_json"))
    if first["loc"] == ("body",) and not isinstance(error.body, dict):
        return error_response(
            UserError("A JSON object is expected as the body, with content-type application/json.")
        )
    of_body = first["loc"][0] == "body"
    same = [{**each, "loc": each["loc"][1:]} for each in found if (each["loc"][0] == "body") is of_body]
    return error_response(BadParameter(*refusal(same, error.body if of_body else None)))


def _methods(request: Request) -> str:
    """All methods of this path, each of which is a route of its own; empty for what the document does not have."""
    path = getattr(request.scope.get("route"), "path_format", None)
    return ", ".join(sorted(method.upper() for method in request.app.openapi()["paths"].get(path, ())))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return http_error(404, f"Unknown request URL: {request.method} {request.url.path}")
    if error.status_code == 405:
        message = f"Not allowed: {request.method} {request.url.path}"
        return http_error(405, message, {"allow": _methods(request) or (error.headers or {}).get("allow", "")})
    return http_error(error.status_code, str(error.detail), dict(error.headers or {}))
