"""OpenID Connect, authorization code flow with PKCE, against the one issuer that the operator names.

Nothing of the issuer is asked before somebody logs in. Its keys are read again when a token is signed by one that is not
known, so that rotation needs no restart. Source: OpenID Connect Core 1.0, 3.1; RFC 7636; RFC 9700.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

import httpx
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from serving.auth import Forbidden
from serving.oidc_file import OidcFile, check_url
from storage.errors import StorageUnavailable, UserError

# Only what is signed by a private key: neither `none`, nor a MAC under a secret that might be a public key.
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
LEEWAY = 60  # seconds that clocks may differ
KNOWN_SECONDS = 3600.0  # for which what the issuer says of itself is believed
AGAIN_SECONDS = 5.0  # before keys are asked for again because of a token
MAX_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(10, connect=5)


class LoginRefused(Forbidden):
    """The issuer's word is not good, or gives no rights here."""

    code = "login_refused"


class IssuerUnavailable(StorageUnavailable):
    """The issuer does not answer, or not as an issuer does."""

    code = "issuer_unavailable"


@dataclass(frozen=True)
class Attempt:
    """What a login in progress must remember: the browser keeps it, signed."""

    state: str
    nonce: str
    verifier: str


class Issuer:
    """The trusted issuer. Safe to share between threads."""

    def __init__(self, file: OidcFile, clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = file, clock
        self._lock = threading.Lock()
        self._metadata: tuple[float, dict[str, Any]] | None = None
        self._keys: tuple[float, KeySet] | None = None

    @property
    def redirect_uri(self) -> str:
        return f"{self._file.public_url}/auth/callback"

    def login_url(self, attempt: Attempt) -> str:
        """Where the browser is sent. Raises IssuerUnavailable."""
        url = prepare_grant_uri(
            self._about()["authorization_endpoint"],
            client_id=self._file.client_id,
            response_type="code",
            redirect_uri=self.redirect_uri,
            scope="openid profile",
            state=attempt.state,
            nonce=attempt.nonce,
            code_challenge=create_s256_code_challenge(attempt.verifier),
            code_challenge_method="S256",
        )
        return str(url)

    def claims(self, code: str, attempt: Attempt) -> dict[str, Any]:
        """What the issuer says of who has logged in. Raises LoginRefused, IssuerUnavailable."""
        form = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": self.redirect_uri,
            "client_id": self._file.client_id, "code_verifier": attempt.verifier,
        }  # fmt: skip
        told = self._ask("POST", self._about()["token_endpoint"], data=form, auth=self._client_auth())
        return self._checked(told.get("id_token"), attempt.nonce)

    def _client_auth(self) -> tuple[str, str] | None:
        """RFC 6749, 2.3.1: both are form-encoded before they are joined."""
        secret = self._file.client_secret
        return None if secret is None else (quote_plus(self._file.client_id), quote_plus(secret))

    def _checked(self, id_token: Any, nonce: str) -> dict[str, Any]:
        if not isinstance(id_token, str):
            raise LoginRefused("The issuer has sent no ID token.")
        try:
            claims = self._decoded(id_token).claims
            told = jwt.ClaimsOption(essential=True)
            jwt.JWTClaimsRegistry(
                now=int(self._clock()),
                leeway=LEEWAY,
                iss=jwt.ClaimsOption(essential=True, value=self._file.issuer),
                aud=jwt.ClaimsOption(essential=True, value=self._file.client_id),
                nonce=jwt.ClaimsOption(essential=True, value=nonce),
                exp=told, iat=told, sub=told,
            ).validate(claims)  # fmt: skip
        except (JoseError, ValueError) as error:
            raise LoginRefused(f"The issuer's ID token is not good: {getattr(error, 'error', 'invalid')}.") from None
        several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if claims.get("azp", None if several else self._file.client_id) != self._file.client_id:
            raise LoginRefused("The issuer's ID token is for another client.")
        return dict(claims)

    def _decoded(self, id_token: str) -> jwt.Token:
        keys = self._known_keys(0.0)
        try:
            return jwt.decode(id_token, keys, algorithms=ALGORITHMS)
        except (JoseError, ValueError):
            fresh = self._known_keys(self._clock() - AGAIN_SECONDS)
            if fresh is keys:
                raise
            return jwt.decode(id_token, fresh, algorithms=ALGORITHMS)

    def _about(self) -> dict[str, Any]:
        """The issuer's metadata, which must be its own."""
        with self._lock:
            if self._metadata is None or self._clock() - self._metadata[0] > KNOWN_SECONDS:
                told = self._get(f"{self._file.issuer.rstrip('/')}/.well-known/openid-configuration")
                if told.get("issuer") != self._file.issuer:
                    raise IssuerUnavailable("The issuer's metadata are another issuer's.")
                for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
                    try:
                        check_url(str(told.get(name)).partition("?")[0])
                    except ValueError:
                        raise IssuerUnavailable(f"The issuer's {name} is no https URL.") from None
                self._metadata = self._clock(), told
            return self._metadata[1]

    def _known_keys(self, since: float) -> KeySet:
        """The issuer's public keys, asked for again if they were last asked for before `since`."""
        uri = self._about()["jwks_uri"]
        with self._lock:
            oldest = max(since, self._clock() - KNOWN_SECONDS)
            if self._keys is None or self._keys[0] < oldest:
                try:
                    keys = KeySet.import_key_set(self._get(uri))  # type: ignore[arg-type]
                except (JoseError, ValueError, KeyError, TypeError):
                    raise IssuerUnavailable("The issuer's keys cannot be read.") from None
                self._keys = self._clock(), keys
            return self._keys[1]

    def _get(self, url: str) -> dict[str, Any]:
        return self._ask("GET", url)

    def _ask(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        """The issuer's JSON object, read within bounds; what it refuses is no login."""
        try:
            with httpx.stream(method, url, timeout=TIMEOUT, follow_redirects=False, **options) as answer:
                body = b""
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > MAX_BYTES:
                        raise IssuerUnavailable("The issuer's answer is too large.")
                if method == "POST" and 400 <= answer.status_code < 500:
                    raise LoginRefused("The issuer does not accept this login; start again.")
                answer.raise_for_status()
            told = httpx.Response(200, content=body).json()
        except (httpx.HTTPError, ValueError):
            raise IssuerUnavailable("The issuer does not answer.") from None
        if not isinstance(told, dict):
            raise IssuerUnavailable("The issuer's answer is no JSON object.")
        return told


def groups_of(claims: dict[str, Any], name: str) -> frozenset[str]:
    """The user's groups. Raises UserError for a claim that is no list of names."""
    told = claims.get(name, [])
    told = [told] if isinstance(told, str) else told
    if not isinstance(told, list) or not all(isinstance(group, str) and 0 < len(group) <= 240 for group in told):
        raise UserError(f"The issuer's claim {name!r} is no list of names.")
    return frozenset(told)
