"""Who is asking. A key is shown once; the catalogue keeps its HMAC under the master secret, so that a stolen
database opens nothing. The tenant always comes from the key, never from a request."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ApiKey, AuditEvent, Corpus, Tenant
from storage.errors import NotFound, UserError

KEY_PREFIX = "pr_"
SCOPES = ("read", "write", "admin")
DEFAULT_TENANT = "default"
Clock = Callable[[], float]


class Unauthorized(UserError):
    """No key, a wrong one or a revoked one: the three look alike."""

    code = "invalid_api_key"


class Forbidden(UserError):
    """The key is good but lacks the scope."""

    code = "insufficient_scope"


@dataclass(frozen=True)
class Principal:
    """The holder of a key. `corpora` None: every corpus of the tenant."""

    tenant_id: str
    key_id: str | None
    scopes: frozenset[str]
    corpora: frozenset[str] | None = None

    def may(self, scope: str) -> bool:
        """Admin includes write, and write includes read."""
        implied = {"read": SCOPES, "write": ("write", "admin"), "admin": ("admin",)}[scope]
        return not self.scopes.isdisjoint(implied)

    @property
    def names(self) -> frozenset[str]:
        """What a document's access list knows it by."""
        return frozenset({self.key_id} if self.key_id else ())

    @property
    def scope(self) -> str:
        """Whose conversations are kept together: never those of two keys."""
        return repr((self.tenant_id, sorted(self.names)))

    def sees(self, corpus_id: str | None) -> bool:
        """Whether a corpus of its own tenant is within the key's restriction."""
        return self.corpora is None or corpus_id in self.corpora


@dataclass(frozen=True)
class NewKey:
    """What an admin asks for."""

    name: str
    scopes: tuple[str, ...] = ("read", "write")
    corpora: tuple[str, ...] | None = None


def key_mac(secret: bytes, key: str) -> str:
    """The form in which a key is stored and looked up."""
    return hmac.new(secret, b"preread api key\0" + key.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def authenticate(catalogue: Catalogue, secret: bytes, key: str) -> Principal:
    """The principal of a key. Raises Unauthorized."""
    mac = key_mac(secret, key)
    with catalogue.read() as session:
        row = session.scalars(select(ApiKey).where(ApiKey.mac == mac)).first()
        if row is None or not hmac.compare_digest(row.mac, mac) or row.revoked_at is not None:
            raise Unauthorized("Incorrect API key provided.")
        return principal_of(row)


def principal_of(row: ApiKey) -> Principal:
    """A key's row as a principal."""
    corpora = None if row.corpora is None else frozenset(row.corpora)
    return Principal(row.tenant_id, row.id, frozenset(row.scopes), corpora)


def ensure_admin_key(catalogue: Catalogue, secret: bytes, clock: Clock = time.time) -> str | None:
    """On the first start: make the default tenant and its admin key, and return that key, this once."""
    with catalogue.write() as session:
        if session.get(Tenant, DEFAULT_TENANT) is None:
            session.add(Tenant(id=DEFAULT_TENANT, name=DEFAULT_TENANT, created_at=clock()))
            session.flush()
        if session.scalars(select(ApiKey.id).limit(1)).first() is not None:
            return None
        row, key = _add_key(session, secret, DEFAULT_TENANT, NewKey("first admin key", ("admin",)), clock())
        _audit(session, DEFAULT_TENANT, None, "api_key.create", row.id, clock())
    return key


def create_key(
    catalogue: Catalogue, secret: bytes, actor: Principal, wanted: NewKey, clock: Clock = time.time
) -> dict[str, Any]:
    """Make a key for the actor's tenant; only this answer ever holds the key itself. Raises UserError."""
    with catalogue.write() as session:
        _check_wanted(session, actor, wanted)
        row, key = _add_key(session, secret, actor.tenant_id, wanted, clock())
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
        "created_at": int(row.created_at),
        "revoked_at": None if row.revoked_at is None else int(row.revoked_at),
    }


def audit(session: Session, actor: Principal, action: str, target: str, at: float) -> None:
    """Write down who did what, in the caller's transaction."""
    _audit(session, actor.tenant_id, actor.key_id, action, target, at)


def _audit(session: Session, tenant_id: str, key_id: str | None, action: str, target: str, at: float) -> None:
    session.add(AuditEvent(tenant_id=tenant_id, key_id=key_id, action=action, target=target, at=at))


def _add_key(
    session: Session, secret: bytes, tenant_id: str, wanted: NewKey, at: float
) -> tuple[ApiKey, str]:
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    row = ApiKey(
        id=f"key-{secrets.token_hex(12)}",
        tenant_id=tenant_id,
        name=wanted.name,
        mac=key_mac(secret, key),
        hint=key[-4:],
        scopes=list(wanted.scopes),
        corpora=None if wanted.corpora is None else list(wanted.corpora),
        created_at=at,
        revoked_at=None,
    )
    session.add(row)
    session.flush()
    return row, key


def _check_wanted(session: Session, actor: Principal, wanted: NewKey) -> None:
    """Scopes are known, corpora are the tenant's, and nobody hands out more than they hold."""
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
