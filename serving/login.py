"""Logins of people. A login is a short-lived key of theirs, which their browser keeps in a cookie that no script can read:
so it is checked, limited, listed, revoked and audited as every key is.

A browser sends a cookie along whoever has made it ask. So what is asked for with the cookie alone changes nothing: any method
but GET also needs the header `x-csrf-token`, which only a script of this origin can learn (GET /auth/session).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Any

from anyio import CapacityLimiter
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError

from serving.auth import NewKey, Principal, add_key, audit, principal_of
from serving.oidc import Attempt, Issuer, LoginRefused, groups_of
from serving.oidc_file import OidcFile, Rule
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ApiKey, Corpus, LoginState, Tenant

COOKIE = "preread_session"
ATTEMPT_COOKIE = "preread_login"
ATTEMPT_SECONDS = 600
THREADS = 4  # that wait for the issuer at once
Clock = Callable[[], float]


class Login:
    """Logins by the operator's issuer."""

    def __init__(self, catalogue: Catalogue, secret: bytes, file: OidcFile, clock: Clock = time.time) -> None:
        self.file = file
        self._catalogue, self._secret, self._clock = catalogue, secret, clock
        self._issuer = Issuer(file, clock)
        self.threads = CapacityLimiter(THREADS)
        digest = hmac.new(secret, b"preread login attempt", hashlib.sha256).digest()
        self._key = OctKey.import_key(digest)

    @property
    def is_secure(self) -> bool:
        """Whether browsers come by https, so that cookies may be kept to it."""
        return self.file.public_url.startswith("https://")

    def begin(self, goal: str) -> tuple[str, str]:
        """Where to send the browser, and what it is to keep until it is back. `goal`: where it goes then."""
        attempt = Attempt(*(secrets.token_urlsafe(48) for _ in range(3)))
        claims = {**vars(attempt), "goal": local_path(goal), "exp": int(self._clock()) + ATTEMPT_SECONDS}
        return self._issuer.login_url(attempt), jwt.encode({"alg": "HS256"}, claims, self._key)

    def finish(self, code: str, state: str, kept: str) -> tuple[str, str, int]:
        """The new login's key, where to go with it, and for how many seconds it is good. Raises LoginRefused."""
        attempt, goal = self._kept(kept, state)
        self._use_once(attempt)
        claims = self._issuer.claims(code, attempt)
        groups = groups_of(claims, self.file.groups_claim)
        rule = next((rule for rule in self.file.rules if rule.group == "*" or rule.group in groups), None)
        if rule is None:
            raise LoginRefused("You are in none of the groups that may use this service.")
        return self._open(str(claims["sub"]), groups, rule), goal, self.file.session_minutes * 60

    def close(self, who: Principal) -> None:
        """End a login. Keys that are none stay as they are."""
        with self._catalogue.write() as session:
            row = session.get(ApiKey, who.key_id)
            if row is not None and row.user_id is not None and row.revoked_at is None:
                row.revoked_at = self._clock()
                audit(session, who, "logout", row.id, self._clock())

    def csrf_token(self, who: Principal) -> str:
        """What a request that changes something must show beside the cookie."""
        return hmac.new(self._secret, f"preread csrf\0{who.key_id}".encode(), hashlib.sha256).hexdigest()

    def _kept(self, kept: str, state: str) -> tuple[Attempt, str]:
        try:
            claims = jwt.decode(kept, self._key, algorithms=["HS256"]).claims
            jwt.JWTClaimsRegistry(now=int(self._clock()), exp={"essential": True}).validate(claims)
        except (JoseError, ValueError):
            raise LoginRefused("This login was not begun in this browser, or too long ago; start again.") from None
        attempt = Attempt(*(str(claims[name]) for name in ("state", "nonce", "verifier")))
        if not hmac.compare_digest(attempt.state.encode(), state.encode("utf-8", "replace")):
            raise LoginRefused("This answer belongs to another login; start again.")
        return attempt, str(claims["goal"])

    def _use_once(self, attempt: Attempt) -> None:
        now, digest = self._clock(), hashlib.sha256(attempt.state.encode()).hexdigest()
        with self._catalogue.write() as session:
            session.execute(delete(LoginState).where(LoginState.expires_at < now))
            session.add(LoginState(digest=digest, expires_at=now + 2 * ATTEMPT_SECONDS))
            try:
                session.flush()
            except IntegrityError:
                raise LoginRefused("This login has been used; start again.") from None

    def _open(self, subject: str, groups: frozenset[str], rule: Rule) -> str:
        now = self._clock()
        if not 0 < len(subject) <= 255:
            raise LoginRefused("The issuer's name for this user cannot be kept.")
        wanted = NewKey(
            name=f"login of {subject}",
            scopes=tuple(rule.scopes),
            corpora=None if rule.corpora is None else tuple(rule.corpora),
            expires_at=now + self.file.session_minutes * 60,
            principals=(f"user:{subject}", *sorted(f"group:{group}" for group in groups)),
            user_id=subject,
        )
        with self._catalogue.write() as session:
            tenant = session.get(Tenant, rule.tenant)
            if tenant is None or tenant.disabled_at is not None:
                raise LoginRefused("The tenant of your group is not there, or disabled.")
            for corpus_id in rule.corpora or ():
                corpus = session.get(Corpus, corpus_id)
                if corpus is None or corpus.tenant_id != rule.tenant:
                    raise LoginRefused("A corpus of your group's rule is not its tenant's.")
            over = select(ApiKey.id).where(ApiKey.user_id.is_not(None), ApiKey.expires_at < now)
            session.execute(delete(ApiKey).where(ApiKey.id.in_(over)))
            row, key = add_key(session, self._secret, rule.tenant, wanted, now)
            audit(session, principal_of(row), "login", row.id, now)
        return key


def local_path(goal: str) -> str:
    """A path of this service, so that a login leads nowhere else."""
    plain = goal.startswith("/") and not goal.startswith("//") and len(goal) <= 1000
    return goal if plain and goal.isascii() and goal.isprintable() and "\\" not in goal else "/"


def session_shape(login: Login, who: Principal) -> dict[str, Any]:
    """Who is logged in, for the page."""
    return {
        "object": "session",
        "user_id": who.user_id,
        "tenant_id": who.tenant_id,
        "scopes": sorted(who.scopes),
        "csrf_token": login.csrf_token(who),
    }
