"""A small OpenID issuer on loopback with real keys. It checks what an issuer must, and lies as a test asks it to."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote_plus

import httpx
from api_kit import running
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse
from starlette.routing import Route

CLIENT, SECRET = "preread", "the client's secret"


@dataclass
class Issuer:
    """`user`: claims of whoever logs in. `lie`: changes the claims of the next tokens. `sign`: makes the token of them."""

    url: str = ""
    user: dict[str, Any] = field(default_factory=lambda: {"sub": "ann", "groups": ["staff"]})
    lie: Callable[[dict[str, Any]], None] = lambda claims: None
    sign: Callable[[dict[str, Any]], str] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    _codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rotate()

    def rotate(self) -> None:
        """Another key, under another id; the old one is no longer published."""
        self.key = RSAKey.generate_key(2048, {"kid": secrets.token_hex(4), "use": "sig"})

    def running(self) -> AbstractContextManager[str]:
        paths = {
            "/.well-known/openid-configuration": self._metadata, "/keys": self._keys, "/authorize": self._authorize,
        }  # fmt: skip
        routes = [Route(path, handler) for path, handler in paths.items()]
        return running(Starlette(routes=[*routes, Route("/token", self._token, methods=["POST"])]))

    async def _metadata(self, request: Request) -> JSONResponse:
        self.asked.append("metadata")
        return JSONResponse(
            {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "jwks_uri": f"{self.url}/keys",
                **self.about,
            }
        )

    async def _keys(self, request: Request) -> JSONResponse:
        self.asked.append("keys")
        return JSONResponse(KeySet([self.key]).as_dict(private=False))

    async def _authorize(self, request: Request) -> RedirectResponse:
        asked = dict(request.query_params)
        assert (asked["client_id"], asked["response_type"], asked["code_challenge_method"]) == (CLIENT, "code", "S256")
        assert "openid" in asked["scope"].split()
        code = secrets.token_urlsafe(8)
        self._codes[code] = asked
        return RedirectResponse(httpx.URL(asked["redirect_uri"], params={"code": code, "state": asked["state"]}).__str__())

    async def _token(self, request: Request) -> JSONResponse:
        form = {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}
        asked = self._codes.pop(form["code"], None)
        basic = base64.b64encode(f"{CLIENT}:{quote_plus(SECRET)}".encode()).decode()
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        good = (
            asked is not None
            and request.headers.get("authorization") == f"Basic {basic}"
            and challenge == asked["code_challenge"]
            and form["redirect_uri"] == asked["redirect_uri"]
        )
        if not good or asked is None:
            return JSONResponse({"error": "invalid_grant"}, 400)
        now = int(time.time())
        claims = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": asked["nonce"], **self.user}
        self.lie(claims)
        token = (self.sign or self.signed)(claims)
        return JSONResponse({"access_token": "x", "token_type": "Bearer", "id_token": token})

    def signed(self, claims: dict[str, Any]) -> str:
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key)

    def unsigned(self, claims: dict[str, Any]) -> str:
        """alg: none"""
        parts = [b'{"alg":"none"}', _json(claims)]
        return b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts).decode() + "."

    def signed_by_another(self, claims: dict[str, Any]) -> str:
        """A key of somebody's own under the published key's id."""
        other = RSAKey.generate_key(2048, {"kid": self.key.kid})
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, other)

    def maced_with_the_public_key(self, claims: dict[str, Any]) -> str:
        """The old trick: HS256 with the published key for its secret."""
        parts = [json.dumps({"alg": "HS256", "kid": self.key.kid}).encode(), _json(claims)]
        head = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
        mac = hmac.new(self.key.as_pem(private=False), head, hashlib.sha256).digest()
        return (head + b"." + base64.urlsafe_b64encode(mac).rstrip(b"=")).decode()


def _json(claims: dict[str, Any]) -> bytes:
    return json.dumps(claims).encode()
