"""Settings: read once at the edge, frozen, few. An unknown variable with our prefix stops the process."""

from __future__ import annotations

import difflib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from storage.errors import UserError
from storage.types import CODEC_NAMES

PREFIX = "PREREAD_"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Settings:
    """Every field is an environment variable: PREREAD_ and the field's name in capitals."""

    data_dir: Path = Path("data")
    host: str = "127.0.0.1"
    port: int = 8321
    # Where things live. Empty: under the data folder.
    database_url: str = ""  # sqlite:///… or postgresql+psycopg://…
    object_store: str = ""  # a folder, or s3://bucket/prefix
    s3_endpoint: str = ""
    s3_access_key: str = ""
    s3_secret_key: str = ""
    s3_region: str = "us-east-1"
    encryption_keys: str = ""  # secrets, newest first, or "master": objects are encrypted here (docs/encryption.md)
    broker_url: str = ""  # redis://…; empty: the local broker that `preread up` starts
    secret: str = ""  # master secret for API keys and KV keys; empty: generated once in the data folder
    # A parent site that has stored KV for this one; both or neither.
    parent_url: str = ""  # https://…
    parent_key: str = ""  # what `preread site add` has printed there
    # The reader model and the embedder: a folder, or "embedded".
    model: str = "embedded"
    embedder: str = "embedded"
    reranker: str = ""  # a cross-encoder's folder; empty: searches are not reranked
    device: str = "cpu"
    dtype: str = "bfloat16"
    codec: str = ""  # how KV is written, by name; empty: `transform` in S3, where bytes are what costs, `raw` in a folder
    threads: int = 0  # 0: as many as the machine has cores
    # Chunking, retrieval and prompts.
    chunk_tokens: int = 400
    context_tokens: int = 4096  # budget for retrieved chunks
    top_k: int = 8
    method: str = "default"
    # Bounds.
    max_requests: int = 8  # answered at once by one engine; more wait in a queue of four times as many
    memory_cache_bytes: int = 512 << 20  # stored KV that was read last
    disk_cache_bytes: int = -1  # of the same, in the data folder; -1: 8 GiB in front of S3, none in front of a folder
    blended_cache_bytes: int = 256 << 20  # blended prompts, for a conversation's next turn
    canary_share: float = 0.01  # of the answers, compared with full prefill when the engine is idle
    max_upload_bytes: int = 512 << 20
    lease_seconds: float = 60.0
    tick_seconds: float = 2.0
    policy_file: str = ""  # the operator's rules for stored KV, YAML; read again when it changes. See docs/policies.md
    source_roots: str = ""  # folders, ':'-separated, from which corpora may be synced; empty: none
    oidc_file: str = ""  # who may log in to the page, and as what, YAML; empty: keys only. See docs/access.md
    allowed_hosts: str = ""  # split by commas: where sources and webhooks may lead; empty: nowhere. See docs/sources.md

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'catalogue.db'}"

    @property
    def objects(self) -> str:
        return self.object_store or str(self.data_dir / "objects")

    @property
    def stored_codec(self) -> str:
        """The name of the codec that KV is stored with, unless a rule says otherwise."""
        return self.codec or codec_for(self.objects)

    @property
    def disk_cache(self) -> int:
        """Bytes of the disk tier. A disk in front of a disk is of no use, and copies there are not encrypted."""
        if self.disk_cache_bytes >= 0:
            return self.disk_cache_bytes
        return 8 << 30 if self.objects.startswith("s3://") and not self.encryption_keys else 0


def codec_for(objects: str) -> str:
    """The codec for an object store: a local disk gives raw KV as fast as memory, a network is waited for by the byte."""
    return "transform" if objects.startswith("s3://") else "raw"


def load_settings(environ: Mapping[str, str] | None = None, **overrides: object) -> Settings:
    """Settings from the environment. Raises UserError for an unknown name (with its nearest) or a bad value."""
    env = os.environ if environ is None else environ
    known = {f.name: f for f in fields(Settings)}
    values: dict[str, object] = {}
    for name, text in env.items():
        if not name.startswith(PREFIX):
            continue
        field = name.removeprefix(PREFIX).lower()
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""
            raise UserError(f"unknown setting {name}{hint}")
        values[field] = _convert(name, text, known[field].default)
    settings = Settings(**{**values, **{k: v for k, v in overrides.items() if v is not None}})  # type: ignore[arg-type]
    return _checked(settings)


def _checked(settings: Settings) -> Settings:
    if settings.codec and settings.codec not in CODEC_NAMES:
        raise UserError(f"{PREFIX}CODEC is one of {', '.join(CODEC_NAMES)}, not {settings.codec!r}")
    if settings.dtype not in DTYPES:
        raise UserError(f"{PREFIX}DTYPE is one of {', '.join(DTYPES)}, not {settings.dtype!r}")
    if not 0 < settings.port < 65536:
        raise UserError(f"{PREFIX}PORT is a number from 1 to 65535, not {settings.port}")
    if not 0 <= settings.canary_share <= 1:
        raise UserError(f"{PREFIX}CANARY_SHARE is a share of the answers, from 0 to 1, not {settings.canary_share}")
    words = [word.strip() for word in settings.encryption_keys.split(",")]
    if settings.encryption_keys and any(word != "master" and len(word.encode()) < 32 for word in words):
        raise UserError(f"{PREFIX}ENCRYPTION_KEYS: each is `master` or a secret of 32 characters or more, split by commas")
    if bool(settings.parent_url) != bool(settings.parent_key):
        raise UserError(f"set both {PREFIX}PARENT_URL and {PREFIX}PARENT_KEY, or neither")
    return settings


def _convert(name: str, text: str, default: object) -> object:
    kind = Path if isinstance(default, Path) else type(default)
    try:
        return kind(text)  # type: ignore[call-arg]
    except ValueError as error:
        raise UserError(f"{name}={text!r} is not a valid {kind.__name__}") from error


def master_secret(settings: Settings) -> bytes:
    """The secret under which API keys and KV keys are HMACs: from the settings, or made once in the data folder."""
    if settings.secret:
        return settings.secret.encode()
    path = settings.data_dir / "secret"
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        fresh = path.with_name(f".secret-{os.getpid()}-{secrets.token_hex(4)}")
        descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(secrets.token_hex(32))
        try:
            os.link(fresh, path)  # whole or not at all, and only one process wins
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    text = path.read_bytes().strip()
    if len(text) < 32:
        raise UserError(f"{path} is damaged: restore it from a backup, or delete it and re-create all API keys")
    return text
