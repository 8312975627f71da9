"""The page at `/`: static files under a policy that lets nothing run, load or be sent but from here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

router = APIRouter(include_in_schema=False)
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",
}


@cache
def _shipped() -> Mapping[str, bytes]:
    """All files of the page by name. A request can name nothing else."""
    folder = files("serving").joinpath("page")
    return MappingProxyType({f.name: f.read_bytes() for f in folder.iterdir() if f.name.rpartition(".")[2] in TYPES})


@router.get("/")
async def show_page(request: Request) -> Response:
    return _answer(request, "index.html")


@router.get("/page/{name}")
async def show_page_file(request: Request, name: str) -> Response:
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    data = _shipped().get(name)
    if data is None:
        raise HTTPException(404)
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=TYPES[name.rpartition(".")[2]], headers=headers)
