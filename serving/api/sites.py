"""/v1/sites and /v1/purges for admins; /site for the sites, which show no API key but sign each request."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field, ValidationError

from serving.api.access import Admin, Parts, Reader
from serving.api.bodies import Body
from serving.api.errors import http_error
from serving.api.json_body import StrictJSON
from serving.api.parts import ApiParts
from serving.api.shapes import stores, work
from serving.api.shapes.common import told
from serving.doors import purges, sites
from serving.doors.paging import listing
from serving.doors.sites import Signed
from storage.catalogue.sites import PAGE
from storage.errors import ObjectMissing, UserError

router = APIRouter(tags=["sites"], route_class=StrictJSON)
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")
Expires = Annotated[int, Query(ge=0, lt=1 << 40)]
Signature = Annotated[str, Query(pattern="^[0-9a-f]{64}$")]


class SiteBody(Body):
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    corpora: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None


class PushBody(Body):
    corpora: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None


class SyncBody(BaseModel):
    """`cursor`: the tombstones that are applied; `erased`: those that no memory of the site can hold any more."""

    cursor: Annotated[int, Field(ge=0)] | None
    erased: Annotated[int, Field(ge=0)]


class CompareBody(BaseModel):
    keys: Annotated[list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]], Field(max_length=PAGE)]


class WantedBody(BaseModel):
    after: Annotated[str, Field(max_length=64)]


@router.post("/v1/sites", responses=told(work.NewSite))
def add_site(parts: Parts, who: Admin, body: SiteBody) -> dict[str, Any]:
    return sites.add(parts, who, body.name, body.corpora)


@router.get("/v1/sites", responses=told(work.SiteList))
def list_sites(parts: Parts, who: Admin) -> dict[str, Any]:
    return listing(sites.show_all(parts, who), has_more=False)


@router.delete("/v1/sites/{site_id}", responses=told(work.RemovedSite))
def remove_site(parts: Parts, who: Admin, site_id: str) -> dict[str, Any]:
    return sites.remove(parts, who, site_id)


@router.post("/v1/sites/{site_id}/push", responses=told(work.Site))
def push_to_site(parts: Parts, who: Admin, site_id: str, body: PushBody | None = None) -> dict[str, Any]:
    return sites.push(parts, who, site_id, (body or PushBody()).corpora)


@router.get("/v1/purges/{purge_id}", responses=told(stores.Purge))
def retrieve_purge(parts: Parts, who: Reader, purge_id: str) -> dict[str, Any]:
    return purges.show(parts, who, purge_id)


# --- for the sites themselves --------------------------------------------------------------------------------


@router.head("/site/{site_id}/objects/{name:path}")
def find_site_object(parts: Parts, site_id: str, name: str, expires: Expires, signature: Signature) -> Response:
    try:
        size = sites.find_object(parts, Signed("HEAD", site_id, name, expires, signature))
    except ObjectMissing:
        return http_error(404, "no such object")
    return Response(headers={"content-length": str(size), "accept-ranges": "bytes"})


@router.get("/site/{site_id}/objects/{name:path}", response_class=Response)
def fetch_site_object(
    parts: Parts,
    site_id: str,
    name: str,
    expires: Expires,
    signature: Signature,
    range: Annotated[str | None, Header()] = None,
) -> Response:
    try:
        size = sites.find_object(parts, Signed("GET", site_id, name, expires, signature))
    except ObjectMissing:
        return http_error(404, "no such object")
    start, end, status = 0, size, 200
    headers = {"accept-ranges": "bytes", "cache-control": "no-store"}
    if range is not None:
        asked = _RANGE.fullmatch(range)
        if asked is None or int(asked[1]) >= size:
            return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
        start, end, status = int(asked[1]), min(int(asked[2]) + 1, size), 206
        headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    headers["content-length"] = str(end - start)
    body = sites.read_object(parts, name, start, end)
    return StreamingResponse(body, status, headers, media_type="application/octet-stream")


@router.post("/site/{site_id}/{call}", responses=told(work.SiteSync | work.SiteCompared | work.SiteWanted))
async def call_from_site(
    parts: Parts,
    request: Request,
    site_id: str,
    call: Literal["sync", "compare", "wanted"],
    expires: Expires,
    signature: Signature,
) -> dict[str, Any]:
    signed = Signed("POST", site_id, call, expires, signature, await request.body())
    return await to_thread.run_sync(_answer, parts, signed)


def _answer(parts: ApiParts, signed: Signed) -> dict[str, Any]:
    with parts.catalogue.read() as session:
        sites.admit(parts, session, signed)  # before anything is made of its body
    try:
        if signed.name == "sync":
            told = SyncBody.model_validate_json(signed.body)
            return sites.exchange(parts, signed, told.cursor, told.erased)
        if signed.name == "compare":
            return sites.compare(parts, signed, CompareBody.model_validate_json(signed.body).keys)
        return sites.wanted(parts, signed, WantedBody.model_validate_json(signed.body).after)
    except ValidationError:
        raise UserError("the body is not what this call takes") from None
