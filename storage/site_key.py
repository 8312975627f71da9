"""A site's key, and the URLs that are signed with it.

A parent gives a child one key at its registration. It holds a secret of the two, under which the child signs its own
requests, and the secrets of the sharing groups whose KV the child may name. All are derived from the parent's master
secret, which a child never has.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from storage.errors import UserError
from storage.keys import length_prefixed

LIFE_SECONDS = 60  # for which a child signs
SKEW_SECONDS = 30  # by which the two clocks may differ
_PREFIX = "prs_"
_SECRET_TAG = b"preread-site-1"
_URL_TAG = b"preread-site-url-1"


@dataclass(frozen=True)
class SiteKey:
    """What a child knows. `groups`: sharing group -> its secret."""

    site_id: str
    tenant_id: str
    secret: bytes = field(repr=False)
    groups: Mapping[str, bytes] = field(repr=False)

    def text(self) -> str:
        """The key as it is printed once."""
        groups = {name: secret.hex() for name, secret in self.groups.items()}
        fields = {"site": self.site_id, "tenant": self.tenant_id, "secret": self.secret.hex(), "groups": groups}
        return _PREFIX + base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> SiteKey:
        """Raises UserError for what `text()` has not made."""
        try:
            body = text.removeprefix(_PREFIX)
            fields = json.loads(base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True))
            groups = {str(name): bytes.fromhex(secret) for name, secret in fields["groups"].items()}
            key = cls(str(fields["site"]), str(fields["tenant"]), bytes.fromhex(fields["secret"]), groups)
        except (binascii.Error, ValueError, KeyError, TypeError, AttributeError):
            raise UserError("this is no site key: give what `preread site add` has printed, whole") from None
        if not text.startswith(_PREFIX) or len(key.secret) != 32 or any(len(s) != 32 for s in groups.values()):
            raise UserError("this is no site key: give what `preread site add` has printed, whole")
        return key

    def query(self, method: str, name: str, now: float, body: bytes = b"") -> str:
        """The signed query string under which the parent answers a request for some seconds."""
        expires = int(now) + LIFE_SECONDS
        mac = signature(self.secret, method, self.site_id, name, expires, body)
        return urlencode({"expires": expires, "signature": mac})


def site_secret(master: bytes, site_id: str) -> bytes:
    """The 32-byte secret that a parent shares with one site; ValueError where the master secret is empty."""
    if not master:
        raise ValueError("the master secret is empty")
    return hmac.new(master, length_prefixed([_SECRET_TAG, site_id.encode()]), hashlib.sha256).digest()


def signature(secret: bytes, method: str, site_id: str, name: str, expires: int, body: bytes = b"") -> str:
    """HMAC-SHA256, 64 hex digits, of all that a request means: none of it can be exchanged for another."""
    fields = [_URL_TAG, method.encode(), site_id.encode(), name.encode(), str(expires).encode()]
    fields.append(hashlib.sha256(body).digest())
    return hmac.new(secret, length_prefixed(fields), hashlib.sha256).hexdigest()


def is_signed(
    secret: bytes, method: str, site_id: str, name: str, expires: int, given: str, now: float, body: bytes = b""
) -> bool:
    """Whether `given` signs this request, and it is neither expired nor valid for longer than anyone may ask."""
    good = hmac.compare_digest(signature(secret, method, site_id, name, expires, body).encode(), given.encode())
    return good and now - SKEW_SECONDS <= expires <= now + LIFE_SECONDS + SKEW_SECONDS
