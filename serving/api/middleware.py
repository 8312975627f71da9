"""What every request meets before a route does: an id, a log line, a bound on its body, and a principal."""

from __future__ import annotations

import re
import secrets
import time

import structlog
from anyio import to_thread
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.errors import error_response, http_error
from serving.api.metrics import Metrics
from serving.api.parts import ApiParts
from serving.auth import Unauthorized, authenticate
from storage.errors import PrereadError

JSON_LIMIT = 8 << 20
MULTIPART_SLACK = 1 << 20  # part headers and small fields around a file
DRAIN_LIMIT = 32 << 20  # read so much of a refused body, so that the client gets to read the refusal
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

log = structlog.get_logger(__name__)


class RequestShell:
    """Outermost: gives the request its id, logs and counts its end, makes what nobody caught a bare 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        request_id = wanted if _ID.fullmatch(wanted) else f"req-{secrets.token_hex(12)}"
        status, started = 0, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_id)
            except ClientDisconnect:
                status = status or 499
            except Exception as error:  # noqa: BLE001 - the last line: nothing of the error goes out
                response = error_response(error)
                if not status:
                    await response(scope, receive, send_with_id)
            self._note_end(scope, status, time.perf_counter() - started)

    def _note_end(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self.metrics.requests.labels(scope["method"], route, str(status)).inc()
        log.info("request", method=scope["method"], route=route, status=status, ms=round(seconds * 1000, 1))


class BodyLimit:
    """Counts the bytes of a body as they are read; what the header claims only makes the refusal quicker."""

    def __init__(self, app: ASGIApp, max_upload_bytes: int) -> None:
        self.app = app
        self.max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit, read = self._limit(scope["path"], headers), 0
        claimed = headers.get("content-length", "0")
        if claimed.isdecimal() and int(claimed) > limit:
            await http_error(413, _too_large(limit), {"connection": "close"})(scope, receive, send)
            await _drain(receive)
            return

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise HTTPException(413, _too_large(limit), {"connection": "close"})
            return message

        await self.app(scope, counted, send)

    def _limit(self, path: str, headers: Headers) -> int:
        # What sites ask is read before its signature is checked: it gets no room for uploads.
        if path.startswith("/v1/") and headers.get("content-type", "").startswith("multipart/form-data"):
            return self.max_upload_bytes + MULTIPART_SLACK
        return JSON_LIMIT


def _too_large(limit: int) -> str:
    return f"The request body is larger than the {limit:,} bytes allowed."


async def _drain(receive: Receive) -> None:
    read, more = 0, True
    while more and read < DRAIN_LIMIT:
        message = await receive()
        read += len(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)


def _keyed(path: str) -> bool:
    return path == "/retrieval" or (path + "/").startswith("/v1/")


class Authentication:
    """Nothing under /v1, nor Dify's /retrieval, is reached without a good key, nor its body read; routes only ask for a scope."""

    def __init__(self, app: ASGIApp, parts: ApiParts) -> None:
        self.app = app
        self.parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _keyed(scope["path"]):
            try:
                await self._admit(scope)
            except PrereadError as error:
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _admit(self, scope: Scope) -> None:
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise Unauthorized("You didn't provide an API key: send the header Authorization: Bearer <key>.")
        principal = await to_thread.run_sync(
            authenticate, self.parts.catalogue, self.parts.secret, key.strip()
        )
        scope.setdefault("state", {})["principal"] = principal
        structlog.contextvars.bind_contextvars(key_id=principal.key_id)
