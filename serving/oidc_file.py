"""The operator's file on logins: the issuer that is trusted, and what its users may.

    issuer: https://login.example.com/realms/staff
    client_id: preread
    client_secret_file: /run/secrets/oidc      # left out: a public client, which PKCE protects
    public_url: https://preread.example.com    # where browsers reach this service
    session_minutes: 60
    groups_claim: groups
    rules:                                     # the first whose group the user is in; "*": everyone
      - {group: preread-admins, tenant: default, scopes: [admin]}
      - {group: "*", tenant: default, scopes: [read]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from storage.errors import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(_Strict):
    """What members of a group may, and in which tenant. `corpora` None: all of it."""

    group: Annotated[str, Field(min_length=1)]
    tenant: str
    scopes: Annotated[list[Literal["read", "write", "admin", "operator"]], Field(min_length=1)]
    corpora: list[str] | None = None


class OidcFile(_Strict):
    """The whole file."""

    issuer: str
    client_id: Annotated[str, Field(min_length=1)]
    client_secret_file: Path | None = None
    public_url: str
    session_minutes: Annotated[int, Field(ge=1, le=24 * 60)] = 60
    groups_claim: str = "groups"
    rules: Annotated[list[Rule], Field(min_length=1)]

    @field_validator("issuer", "public_url")
    @classmethod
    def _safe(cls, url: str) -> str:
        check_url(url)
        return url.rstrip("/") if urlsplit(url).path == "/" else url

    @property
    def client_secret(self) -> str | None:
        """Raises UserError if the file cannot be read."""
        if self.client_secret_file is None:
            return None
        try:
            return self.client_secret_file.read_text(encoding="utf-8").strip()
        except OSError:
            raise UserError(f"PREREAD_OIDC_FILE: {self.client_secret_file} cannot be read") from None


def check_url(url: str) -> None:
    """Raises ValueError for what is not https, but for http on this machine."""
    parts = urlsplit(url)
    if not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError("a plain URL is expected: https://host/path")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        raise ValueError("https is needed; http only on this machine")


def read_oidc(path: Path) -> OidcFile:
    """The file, checked. Raises UserError with the first mistake."""
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        found = OidcFile.model_validate(told)
    except OSError:
        raise UserError(f"PREREAD_OIDC_FILE={path} cannot be read") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"PREREAD_OIDC_FILE={path} is not YAML") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"PREREAD_OIDC_FILE={path}: {place}: {first['msg'].removeprefix('Value error, ')}") from None
    found.client_secret  # noqa: B018 - a secret that is not there is said at the start
    return found
