"""Credentials of sources: files that the operator puts into a folder. A corpus's source names one, and never holds it."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import httpx
import structlog
import yaml

from storage.errors import UserError

log = structlog.get_logger()
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FIELDS = {"tenant", "url", "username", "password"}


@dataclass(frozen=True)
class Credential:
    """Shown only to what lies at or below `url`."""

    url: httpx.URL
    username: str
    password: str = field(repr=False)

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode("ascii")

    def covers(self, text: str) -> bool:
        """Whether a URL is the credential's own or below it."""
        url = httpx.URL(text)
        if (url.scheme, url.raw_host, url.port) != (self.url.scheme, self.url.raw_host, self.url.port):
            return False
        if any(part in (".", "..") for part in re.split(r"[/\\]", unquote(url.path))):
            return False
        own = self.url.path.rstrip("/")
        return url.path == own or url.path.startswith(own + "/")


def read_credential(folder: Path, name: str, tenant_id: str, url: str) -> Credential:
    """The credential of that name for a tenant's source at `url`.

    The file is YAML: `tenant`, `url` (where it may be shown), `username`, `password`. Raises UserError, the same for one that
    is absent, another tenant's, or for another place."""
    refusal = UserError(f"there is no credential {name!r} for this source; the operator puts it into the server's data folder")
    if not _NAME.fullmatch(name):
        raise refusal
    try:
        found = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise refusal from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        log.warning("credential not readable", name=name, error=type(error).__name__)  # the error may quote the file
        raise refusal from None
    if not isinstance(found, dict) or set(found) != _FIELDS or not all(isinstance(v, str) for v in found.values()):
        log.warning("credential not readable", name=name, error=f"it must have the fields {', '.join(sorted(_FIELDS))}, all text")
        raise refusal
    credential = Credential(httpx.URL(found["url"]), found["username"], found["password"])
    if found["tenant"] != tenant_id or not credential.covers(url):
        raise refusal
    return credential
