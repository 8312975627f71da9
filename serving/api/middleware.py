"""What every request meets before a route does: an id, a log line, a bound on its body, and a principal."""

from __future__ import annotations

import hmac
import re
import secrets
import time

import structlog
from anyio import move_on_after, to_thread
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.errors import error_response, http_error
from serving.api.metrics import Metrics
from serving.api.parts import ApiParts
from serving.auth import NOTED, Forbidden, Principal, Unauthorized, audit, authenticate
from serving.limits import ASKING
from serving.login import COOKIE, Login
from storage.errors import PrereadError

JSON_LIMIT = 8 << 20
MULTIPART_SLACK = 1 << 20  # part headers and small fields around a file
DRAIN_LIMIT = 32 << 20  # read so much of a refused body, so that the client gets to read the refusal
BODY_PAUSE_S = 30.0  # after which without a byte a body is given up
BODY_GRACE_S = 60.0  # of waiting that any body may take; beyond it only one that comes at BODY_BYTES_S
BODY_BYTES_S = 1024
# What a browser makes of an answer that is no page: it shows nothing, runs nothing, and is framed by nobody.
SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Where files are sent, read piece by piece to the disk. Elsewhere a body is read whole before anybody asks for a scope.
FILES = re.compile(r"/v1/(files|uploads/[^/]+/parts|corpora/[^/]+/documents)")
ACTION_LENGTH, TARGET_LENGTH = 64, 200
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
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in SAFE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id), self.metrics.in_progress.track_inprogress():
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
        # Anybody may make up words: each would be a series that stays.
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.metrics.requests.labels(method, route, str(status)).inc()
        log.info("request", method=method, route=route, status=status, ms=round(seconds * 1000, 1))


class BodyLimit:
    """Counts the bytes of a body as they are read, and the seconds that it is waited for; what the header claims only makes
    the refusal quicker."""

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

        more, waited = True, 0.0

        async def counted() -> Message:
            nonlocal read, more, waited
            if not more:  # what comes now is the end of the connection, for which an answer waits as long as it takes
                return await receive()
            began = time.monotonic()
            with move_on_after(BODY_PAUSE_S) as pause:
                message = await receive()
            waited += time.monotonic() - began
            if pause.cancelled_caught or waited > BODY_GRACE_S + read / BODY_BYTES_S:
                raise HTTPException(408, "The request body came too slowly.", {"connection": "close"})
            more = message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > limit:
                raise HTTPException(413, _too_large(limit), {"connection": "close"})
            return message

        await self.app(scope, counted, send)

    def _limit(self, path: str, headers: Headers) -> int:
        if FILES.fullmatch(path) and headers.get("content-type", "").startswith("multipart/form-data"):
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


def check_csrf(login: Login, who: Principal, headers: Headers) -> None:
    """Raises Forbidden unless a script of our own has asked: another origin's cannot know the token."""
    if not hmac.compare_digest(headers.get("x-csrf-token", "").encode(), login.csrf_token(who).encode()):
        raise Forbidden("Send the header x-csrf-token with the token of GET /auth/session.", code="csrf_token_missing")


def _keyed(path: str) -> bool:
    return path == "/retrieval" or (path + "/").startswith("/v1/")


class Authentication:
    """Nothing under /v1, nor Dify's /retrieval, is reached without a good key or login, nor its body read."""

    def __init__(self, app: ASGIApp, parts: ApiParts) -> None:
        self.app = app
        self.parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _keyed(scope["path"]):
            await self.app(scope, receive, send)
            return
        left: dict[str, str] = {}
        try:
            left = await self._admit(scope)
        except PrereadError as error:
            if isinstance(error, Forbidden):
                await to_thread.run_sync(note, self.parts, scope, "denied")
            await error_response(error)(scope, receive, send)
            return

        async def send_what_is_left(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(left)
            await send(message)

        await self.app(scope, receive, send_what_is_left)

    async def _admit(self, scope: Scope) -> dict[str, str]:
        """Find out who asks and count it; what is left to them, as headers. Raises PrereadError."""
        parts, headers = self.parts, Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        by_cookie = not kind and parts.login is not None
        if by_cookie:
            key = HTTPConnection(scope).cookies.get(COOKIE, "")
        elif kind.lower() != "bearer":
            key = ""
        if not key.strip():
            raise Unauthorized("You didn't provide an API key: send the header Authorization: Bearer <key>.")
        principal = await to_thread.run_sync(authenticate, parts.catalogue, parts.secret, key.strip(), parts.clock)
        scope.setdefault("state", {})["principal"] = principal
        structlog.contextvars.bind_contextvars(key_id=principal.key_id)
        ASKING.set(principal)
        left = await to_thread.run_sync(parts.limiter.admit, principal, scope["path"], parts.catalogue)
        if by_cookie and parts.login and scope["method"] not in ("GET", "HEAD"):
            check_csrf(parts.login, principal, headers)
        return left


class AuditTrail:
    """Writes down refusals, and every change that its route has not written down itself."""

    def __init__(self, app: ASGIApp, parts: ApiParts) -> None:
        self.app = app
        self.parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "principal" not in scope.get("state", {}):
            await self.app(scope, receive, send)
            return
        noted: list[str] = []
        NOTED.set(noted)

        async def send_when_noted(message: Message) -> None:
            """What is answered has been written down by then."""
            if message["type"] == "http.response.start" and self._is_due(scope, message["status"], noted):
                await to_thread.run_sync(note, self.parts, scope, "denied" if message["status"] == 403 else "ok")
            await send(message)

        await self.app(scope, receive, send_when_noted)

    def _is_due(self, scope: Scope, status: int, noted: list[str]) -> bool:
        # Who may only read has changed nothing, whatever the method.
        changed = scope["method"] not in ("GET", "HEAD") and scope["state"].get("needed", "read") != "read"
        return status == 403 or (changed and 200 <= status < 300 and not noted)


def note(parts: ApiParts, scope: Scope, outcome: str) -> None:
    """Write down what a known key has asked for. What is refused before it comes to a route is known by its path."""
    route = getattr(scope.get("route"), "path", "unmatched")
    named = "/".join(str(value) for value in scope.get("path_params", {}).values())
    target = (named if "route" in scope else scope["path"])[:TARGET_LENGTH]
    action = f"{scope['method']} {route}"[:ACTION_LENGTH]
    with parts.catalogue.write() as session:
        audit(session, scope["state"]["principal"], action, target, parts.clock(), outcome)
