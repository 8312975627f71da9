"""Who is asking. A key is shown once; the catalogue keeps its HMAC under the master secret, so that a stolen
database opens nothing. The tenant always comes from the key or the login, never from a request.

`operator` stands above tenants: it makes, limits and disables them, and reads nothing of theirs."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.catalogue.audit import Entry, append
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ApiKey, Corpus, Tenant
from storage.errors import NotFound, UserError

KEY_PREFIX = "pr_"
SCOPES = ("read", "write", "admin", "operator")
DEFAULT_TENANT = "default"
Clock = Callable[[], float]
# What the request that is being served has written down so far; threads that work for it share the list.
NOTED: ContextVar[list[str] | None] = ContextVar("noted", default=None)


class Unauthorized(UserError):
    """No key, or a wrong, revoked or expired one, or one of a disabled tenant: all look alike."""

    code = "invalid_api_key"


class Forbidden(UserError):
    """The key is good but lacks the scope."""

    code = "insufficient_scope"


@dataclass(frozen=True)
class Principal:
    """The holder of a key, or who is logged in. `corpora` None: every corpus of the tenant. `principals`: what access
    lists know them by. Limits are by the minute; None: no limit."""

    tenant_id: str
    key_id: str | None
    scopes: frozenset[str]
    corpora: frozenset[str] | None = None
    user_id: str | None = None
    principals: frozenset[str] = frozenset()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def may(self, scope: str) -> bool:
        """Admin includes write, and write includes read; operator includes none of them, and nothing includes it."""
        implied = {
            "read": ("read", "write", "admin"),
            "write": ("write", "admin"),
            "admin": ("admin",),
            "operator": ("operator",),
        }[scope]
        return not self.scopes.isdisjoint(implied)

    @property
    def names(self) -> frozenset[str]:
        """What a document's access list knows it by."""
        return self.principals | ({self.key_id} if self.key_id else set())

    @property
    def own_names(self) -> frozenset[str]:
        """What nobody else is known by: the person who is logged in, through all their logins, or else the key."""
        person = f"user:{self.user_id}" if self.user_id is not None else self.key_id
        return frozenset({person} if person else ())

    @property
    def scope(self) -> str:
        """Whose conversations are kept together: never those of two keys."""
        return repr((self.tenant_id, sorted(self.names)))

    def sees(self, corpus_id: str | None) -> bool:
        """Whether a corpus of its own tenant is within the key's restriction."""
        return self.corpora is None or corpus_id in self.corpora


@dataclass(frozen=True)
class NewKey:
    """What an admin asks for, or a login. `expires_at`: seconds since the epoch."""

    name: str
    scopes: tuple[str, ...] = ("read", "write")
    corpora: tuple[str, ...] | None = None
    expires_at: float | None = None
    principals: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    user_id: str | None = None


def key_mac(secret: bytes, key: str) -> str:
    """The form in which a key is stored and looked up."""
    return hmac.new(secret, b"preread api key\0" + key.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def authenticate(catalogue: Catalogue, secret: bytes, key: str, clock: Clock = time.time) -> Principal:
    """The principal of a key. Raises Unauthorized."""
    mac = key_mac(secret, key)
    query = select(ApiKey).join(Tenant, Tenant.id == ApiKey.tenant_id)
    with catalogue.read() as session:
        row = session.scalars(query.where(ApiKey.mac == mac, Tenant.disabled_at.is_(None))).first()
        if row is None or not hmac.compare_digest(row.mac, mac) or not _in_force(row, clock()):
            raise Unauthorized("Incorrect API key provided.")
        return principal_of(row)


def _in_force(row: ApiKey, now: float) -> bool:
    return row.revoked_at is None and (row.expires_at is None or now < row.expires_at)


def principal_of(row: ApiKey) -> Principal:
    """A key's row as a principal."""
    return Principal(
        tenant_id=row.tenant_id,
        key_id=row.id,
        scopes=frozenset(row.scopes),
        corpora=None if row.corpora is None else frozenset(row.corpora),
        user_id=row.user_id,
        principals=frozenset(row.principals or ()),
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
    )


def ensure_admin_key(catalogue: Catalogue, secret: bytes, clock: Clock = time.time) -> str | None:
    """On the first start: make the default tenant and its admin key, and return that key, this once."""
    with catalogue.write() as session:
        if session.get(Tenant, DEFAULT_TENANT) is None:
            session.add(Tenant(id=DEFAULT_TENANT, name=DEFAULT_TENANT, created_at=clock()))
            session.flush()
        if session.scalars(select(ApiKey.id).limit(1)).first() is not None:
            return None
        first = NewKey("first admin key", ("admin", "operator"))
        row, key = add_key(session, secret, DEFAULT_TENANT, first, clock())
        append(session, Entry(DEFAULT_TENANT, "api_key.create", row.id, clock()))
    return key


def create_key(
    catalogue: Catalogue, secret: bytes, actor: Principal, wanted: NewKey, clock: Clock = time.time
) -> dict[str, Any]:
    """Make a key for the actor's tenant; only this answer ever holds the key itself. Raises UserError."""
    with catalogue.write() as session:
        _check_wanted(session, actor, wanted, clock())
        row, key = add_key(session, secret, actor.tenant_id, wanted, clock())
        audit(session, actor, "api_key.create", row.id, clock())
        return {**key_shape(row), "key": key}


def list_keys(catalogue: Catalogue, actor: Principal) -> list[dict[str, Any]]:
    """All keys of the actor's tenant, oldest first, without their secrets."""
    query = select(ApiKey).where(ApiKey.tenant_id == actor.tenant_id).order_by(ApiKey.created_at, ApiKey.id)
    with catalogue.read() as session:
        return [key_shape(row) for row in session.scalars(query) if _within(actor, row)]


def revoke_key(
    catalogue: Catalogue, actor: Principal, key_id: str, clock: Clock = time.time
) -> dict[str, Any]:
    """Make a key useless from now on; again is no error. Raises NotFound."""
    with catalogue.write() as session:
        row = session.get(ApiKey, key_id)
        if row is None or row.tenant_id != actor.tenant_id or not _within(actor, row):
            raise NotFound(f"No such API key: {key_id!r}")
        if row.revoked_at is None:
            row.revoked_at = clock()
            audit(session, actor, "api_key.revoke", row.id, clock())
        return key_shape(row)


def key_shape(row: ApiKey) -> dict[str, Any]:
    """A key as the API shows it."""
    return {
        "id": row.id,
        "object": "api_key",
        "name": row.name,
        "hint": f"…{row.hint}",
        "scopes": row.scopes,
        "corpora": row.corpora,
        "principals": row.principals or [],
        "user_id": row.user_id,
        "requests_per_minute": row.requests_per_minute,
        "tokens_per_minute": row.tokens_per_minute,
        "created_at": int(row.created_at),
        "expires_at": None if row.expires_at is None else int(row.expires_at),
        "revoked_at": None if row.revoked_at is None else int(row.revoked_at),
    }


def audit(session: Session, actor: Principal, action: str, target: str, at: float, outcome: str = "ok") -> None:
    """Write down who did what, in the caller's transaction."""
    request_id = structlog.contextvars.get_contextvars().get("request_id")
    append(session, Entry(actor.tenant_id, action, target, at, actor.key_id, actor.user_id, request_id, outcome))
    if (noted := NOTED.get()) is not None:
        noted.append(action)


def add_key(session: Session, secret: bytes, tenant_id: str, wanted: NewKey, at: float) -> tuple[ApiKey, str]:
    """A key's row, and the key itself."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    row = ApiKey(
        id=f"key-{secrets.token_hex(12)}",
        tenant_id=tenant_id,
        name=wanted.name,
        mac=key_mac(secret, key),
        hint=key[-4:],
        scopes=list(wanted.scopes),
        corpora=None if wanted.corpora is None else list(wanted.corpora),
        principals=list(wanted.principals) or None,
        user_id=wanted.user_id,
        requests_per_minute=wanted.requests_per_minute,
        tokens_per_minute=wanted.tokens_per_minute,
        created_at=at,
        expires_at=wanted.expires_at,
        revoked_at=None,
    )
    session.add(row)
    session.flush()
    return row, key


def _check_wanted(session: Session, actor: Principal, wanted: NewKey, now: float) -> None:
    """Scopes are known, corpora are the tenant's, and nobody hands out more than they hold."""
    if wanted.expires_at is not None and wanted.expires_at <= now:
        raise UserError("expires_at is in the past: give seconds since the epoch")
    if "operator" in wanted.scopes and not actor.may("operator"):
        raise Forbidden("Only an operator's key makes another one.")
    own = session.get(ApiKey, actor.key_id) if actor.key_id else None
    # A login is a person, who may make keys for their programs.
    ends = own.expires_at if own is not None and own.user_id is None else None
    if ends is not None and (wanted.expires_at or math.inf) > ends:
        raise UserError("a key that expires cannot make one that outlives it: give expires_at")
    if any(name.startswith("key-") for name in wanted.principals):
        raise UserError("a principal is a name like group:legal or user:ann, not the id of a key")
    unknown = [scope for scope in wanted.scopes if scope not in SCOPES]
    if unknown or not wanted.scopes:
        raise UserError(
            f"unknown scope {unknown[0]!r}; use {', '.join(SCOPES)}" if unknown else "name a scope"
        )
    if actor.corpora is not None and wanted.corpora is None:
        raise UserError("a key that is restricted to corpora cannot make one that is not")
    for corpus_id in wanted.corpora or ():
        corpus = session.get(Corpus, corpus_id)
        if corpus is None or corpus.tenant_id != actor.tenant_id or not actor.sees(corpus_id):
            raise NotFound(f"No such vector store: {corpus_id!r}")


def _within(actor: Principal, row: ApiKey) -> bool:
    """A restricted admin sees only keys restricted to the same corpora or fewer."""
    return actor.corpora is None or (row.corpora is not None and actor.corpora.issuperset(row.corpora))
