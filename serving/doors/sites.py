"""Sites: registered by an admin, and admitted by what they sign."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from precompute.rows import request_repair
from serving.api.parts import ApiParts
from serving.auth import Forbidden, Principal, Unauthorized, audit
from serving.doors import corpora
from storage.catalogue import sites, tombstones
from storage.catalogue.schema import Corpus, Site, Tombstone
from storage.errors import NotFound, ObjectMissing, UserError
from storage.keys import group_secret
from storage.names import is_name
from storage.site_key import SiteKey, is_signed, site_secret

PIECE = 1 << 20  # bytes of an object read and sent at a time
_OF_MODELS = ("basis/", "basis-of/")  # what codecs have made of a model, and of no document
_KV_NAME = re.compile(r"kv/([0-9a-f]{2})/(\1[0-9a-f]{62})")


# --- for admins ----------------------------------------------------------------------------------------------


def add(parts: ApiParts, who: Principal, name: str, wanted: Sequence[str] | None) -> dict[str, Any]:
    """Register a site for corpora, by id or name, or for all of the tenant's. Only this answer holds its key.

    Raises NotFound, Forbidden, or UserError for a name that is taken."""
    if wanted is None and who.corpora is not None:
        raise Forbidden("A key that is restricted to corpora cannot register a site for all of them.")
    newest = tombstones.newest(parts.catalogue)
    with parts.catalogue.write() as session:
        ids = None if wanted is None else sorted({corpora.find_named(session, who, each).id for each in wanted})
        if session.scalar(_mine(who).where(Site.name == name, Site.removed_at.is_(None)).limit(1)) is not None:
            raise UserError(f"there is a site {name!r} already; remove it first")
        site = Site(
            id=f"site-{secrets.token_hex(12)}",
            tenant_id=who.tenant_id,
            name=name,
            corpora=ids,
            groups=_groups(session, who, ids),
            pushed=[],
            erased=newest,
            created_at=parts.clock(),
        )
        session.add(site)
        session.flush()
        audit(session, who, "site.add", site.id, parts.clock())
        groups = {group: group_secret(parts.secret, group) for group in site.groups}
        key = SiteKey(site.id, site.tenant_id, site_secret(parts.secret, site.id), groups)
        return {**_shape(session, site), "key": key.text()}


def _groups(session: Session, who: Principal, ids: Sequence[str] | None) -> list[str]:
    """The sharing groups of these corpora, and that of corpora the tenant will make."""
    found = set(session.scalars(corpora.visible(who).with_only_columns(Corpus.sharing_group)))
    if ids is not None:
        return sorted(set(session.scalars(select(Corpus.sharing_group).where(Corpus.id.in_(ids)))))
    return sorted({*found, who.tenant_id})


def show_all(parts: ApiParts, who: Principal) -> list[dict[str, Any]]:
    """The sites that are registered now, oldest first."""
    query = _mine(who).where(Site.removed_at.is_(None)).order_by(Site.created_at, Site.id)
    with parts.catalogue.read() as session:
        return [_shape(session, site) for site in session.scalars(query) if _within(who, site)]


def remove(parts: ApiParts, who: Principal, site_id: str) -> dict[str, Any]:
    """From now on the site gets nothing, and uses no stored KV once its lease is over. Raises NotFound."""
    with parts.catalogue.write() as session:
        site = _find(session, who, site_id)
        site.removed_at = parts.clock()
        audit(session, who, "site.remove", site.id, parts.clock())
        return {**_shape(session, site), "deleted": True}


def push(parts: ApiParts, who: Principal, site_id: str, wanted: Sequence[str] | None) -> dict[str, Any]:
    """Have the site hold all KV of these corpora, now and later; None: of all that it may hold. Raises NotFound."""
    with parts.catalogue.write() as session:
        site = _find(session, who, site_id)
        if wanted is None:
            mine = session.scalars(corpora.visible(who).with_only_columns(Corpus.id))
            ids = site.corpora if site.corpora is not None else sorted(mine)
        else:
            ids = [corpora.find_named(session, who, each).id for each in wanted]
        if site.corpora is not None and (outside := set(ids) - set(site.corpora)):
            raise UserError(f"site {site.name!r} is not registered for {', '.join(sorted(outside))}")
        site.pushed = sorted({*site.pushed, *ids})
        audit(session, who, "site.push", site.id, parts.clock())
        return _shape(session, site)


def _mine(who: Principal) -> Select[Any]:
    return select(Site).where(Site.tenant_id == who.tenant_id)


def _within(who: Principal, site: Site) -> bool:
    """A restricted admin sees only sites restricted to the same corpora or fewer."""
    return who.corpora is None or (site.corpora is not None and who.corpora.issuperset(site.corpora))


def _find(session: Session, who: Principal, site_id: str) -> Site:
    site = sites.live(session, site_id)
    if site is None or site.tenant_id != who.tenant_id or not _within(who, site):
        raise NotFound(f"No such site: {site_id!r}")
    return site


def _shape(session: Session, site: Site) -> dict[str, Any]:
    behind = select(func.count()).select_from(Tombstone).where(Tombstone.seq > site.erased)
    return {
        "id": site.id,
        "object": "site",
        "name": site.name,
        "corpora": site.corpora,
        "pushed": site.pushed,
        "created_at": int(site.created_at),
        "seen_at": site.seen_at,
        "tombstones_pending": session.scalar(behind),
    }


def lags(parts: ApiParts) -> list[tuple[str, float | None, int]]:
    """(name, seconds since it was last seen, tombstones it has not erased) of every site, for the metrics."""
    query = select(Site).where(Site.removed_at.is_(None)).order_by(Site.created_at)
    now = parts.clock()
    with parts.catalogue.read() as session:
        shown = [_shape(session, site) for site in session.scalars(query)]
    return [(s["name"], s["seen_at"] and now - s["seen_at"], s["tombstones_pending"]) for s in shown]


# --- for the sites themselves --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signed:
    """A request as a site has signed it: its method, the object or the call it names, and its body."""

    method: str
    site_id: str
    name: str
    expires: int
    signature: str
    body: bytes = b""


def admit(parts: ApiParts, session: Session, signed: Signed) -> Site:
    """The site that has signed this. Raises Unauthorized: forged, expired, for something else and revoked look alike."""
    s = signed
    secret = site_secret(parts.secret, s.site_id)
    good = is_signed(secret, s.method, s.site_id, s.name, s.expires, s.signature, parts.clock(), s.body)
    site = sites.live(session, s.site_id) if good else None
    if site is None:
        raise Unauthorized("This URL is not valid.")
    return site


def find_object(parts: ApiParts, signed: Signed) -> int:
    """The size in bytes of the object, if the site may hold it. Raises Unauthorized, ObjectMissing, StorageUnavailable."""
    missing = ObjectMissing(f"no object {signed.name[:80]}")
    kv = _KV_NAME.fullmatch(signed.name)
    with parts.catalogue.read() as session:
        site = admit(parts, session, signed)
        if kv is not None and kv[2] not in sites.states(session, site, [kv[2]])[0]:
            raise missing
    if kv is None and not (signed.name.startswith(_OF_MODELS) and is_name(signed.name)):
        raise missing  # never raw/: documents are not a site's to fetch
    size = parts.objects.size(signed.name)
    if size is None:
        if kv is not None:
            _repair(parts, kv[2])
        raise missing
    return size


def _repair(parts: ApiParts, key: str) -> None:
    """What is marked as stored and is not there is computed again here, so that the site need not."""
    with parts.catalogue.write() as session:
        owed = request_repair(session, key)
    if owed:
        parts.ring("precompute")


def read_object(parts: ApiParts, name: str, start: int, end: int) -> Iterator[memoryview]:
    """The bytes [start, end) in pieces. Raises StorageUnavailable, ObjectMissing, also midway."""
    while start < end:
        piece = memoryview(bytearray(min(PIECE, end - start)))
        count = parts.objects.read_into(name, piece, start)
        if not count:
            raise ObjectMissing(f"object {name} has become shorter")
        yield piece[:count]
        start += count


def exchange(parts: ApiParts, signed: Signed, cursor: int | None, erased: int) -> dict[str, Any]:
    """One sync: what the site has erased so far, for what it is to erase next. Raises Unauthorized.

    `reset`: the site's cursor is from another time than ours; it has to compare all that it holds."""
    newest = tombstones.newest(parts.catalogue)
    with parts.catalogue.write() as session:
        site = admit(parts, session, signed)
        site.seen_at = parts.clock()
        if cursor is None or not site.erased <= cursor <= newest or erased > cursor:
            return {"reset": True, "newest": newest, "cursor": None, "erase": []}
        sites.acknowledge(session, site, erased, parts.clock())
    with parts.catalogue.read() as session:
        keys, reached = sites.erasures(session, site, cursor, newest)
    return {"reset": False, "newest": newest, "cursor": reached, "erase": keys}


def compare(parts: ApiParts, signed: Signed, keys: Sequence[str]) -> dict[str, Any]:
    """Of these keys, what the site may have: bytes by key of what is stored, and what is being computed here."""
    with parts.catalogue.read() as session:
        site = admit(parts, session, signed)
        stored, awaited = sites.states(session, site, keys)
    return {"stored": stored, "awaited": awaited}


def wanted(parts: ApiParts, signed: Signed, after: str) -> dict[str, Any]:
    """A page of the keys behind `after` that the site is to hold."""
    with parts.catalogue.read() as session:
        return {"keys": sites.wanted(session, admit(parts, session, signed), after)}

