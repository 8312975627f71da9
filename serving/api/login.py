"""/auth: logins by the operator's issuer, for browsers."""

from __future__ import annotations

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from serving.api.access import Parts
from serving.api.json_body import StrictJSON
from serving.api.middleware import check_csrf, note
from serving.api.parts import ApiParts
from serving.api.shapes import inference
from serving.api.shapes.common import told
from serving.auth import Forbidden, Unauthorized, authenticate
from serving.login import ATTEMPT_COOKIE, ATTEMPT_SECONDS, COOKIE, Login, session_shape
from serving.oidc import LoginRefused
from storage.errors import NotFound

router = APIRouter(prefix="/auth", tags=["login"], route_class=StrictJSON)
Word = Annotated[str, Query(max_length=4096)]


def _login(parts: ApiParts) -> Login:
    if parts.login is None:
        raise NotFound("Logins are not set up here: use an API key.", code="login_not_configured")
    return parts.login


@router.get("/config", responses=told(inference.LoginConfig))
def login_config(parts: Parts) -> dict[str, Any]:
    """Whether people can log in, and where."""
    return {"oidc": parts.login is not None, "login_url": "/auth/login" if parts.login else None}


@router.get("/login", response_class=RedirectResponse, status_code=302)
async def begin_login(parts: Parts, next: Word = "/") -> Response:
    login = _login(parts)
    # Threads of their own: an issuer that hangs must not take those that answer questions.
    url, attempt = await to_thread.run_sync(login.begin, next, limiter=login.threads)
    answer = RedirectResponse(url, 302, {"cache-control": "no-store"})
    _set(answer, login, ATTEMPT_COOKIE, attempt, ATTEMPT_SECONDS, "/auth")
    return answer


@router.get("/callback", response_class=RedirectResponse, status_code=302)
async def finish_login(
    parts: Parts, request: Request, state: Word = "", code: Word = "", error: Word = ""
) -> Response:
    login = _login(parts)
    if error or not code:
        raise LoginRefused("The issuer has refused this login.")
    kept = request.cookies.get(ATTEMPT_COOKIE, "")
    key, goal, seconds = await to_thread.run_sync(login.finish, code, state, kept, limiter=login.threads)
    answer = RedirectResponse(goal, 302, {"cache-control": "no-store"})
    answer.delete_cookie(ATTEMPT_COOKIE, path="/auth")
    _set(answer, login, COOKIE, key, seconds, "/")
    return answer


@router.get("/session", responses=told(inference.Session))
def current_session(parts: Parts, request: Request) -> Response:
    """Who is logged in, and the token that requests which change something must send as x-csrf-token."""
    login = _login(parts)
    who = authenticate(parts.catalogue, parts.secret, _cookie(request), parts.clock)
    return JSONResponse(session_shape(login, who), headers={"cache-control": "no-store"})


@router.post("/logout", responses=told(inference.Ended))
def end_login(parts: Parts, request: Request) -> Response:
    login = _login(parts)
    who = authenticate(parts.catalogue, parts.secret, _cookie(request), parts.clock)
    request.state.principal = who
    try:
        check_csrf(login, who, request.headers)
    except Forbidden:
        note(parts, request.scope, "denied")
        raise
    login.close(who)
    answer = JSONResponse({"object": "session", "deleted": True})
    answer.delete_cookie(COOKIE, path="/")
    return answer


def _cookie(request: Request) -> str:
    key = request.cookies.get(COOKIE)
    if not key:
        raise Unauthorized("You are not logged in.")
    return key


def _set(answer: Response, login: Login, name: str, value: str, seconds: int, path: str) -> None:
    answer.set_cookie(name, value, max_age=seconds, path=path, secure=login.is_secure, httponly=True, samesite="lax")
