"""Settings: read once at the edge, frozen, few. An unknown variable with our prefix stops the process."""

from __future__ import annotations

import contextlib
import difflib
import os
import secrets
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from storage.errors import UserError
from storage.types import CODEC_NAMES

PREFIX = "PREREAD_"
CONFIG = PREFIX + "CONFIG"  # names a TOML file
DTYPES = ("bfloat16", "float16", "float32")
ENGINES = ("torch", "vllm")


def _setting(default: Any, about: str, *, secret: bool = False) -> Any:
    """A field with what it is for, which `preread config check` prints; a secret's value is never printed."""
    return field(default=default, metadata={"about": about, "secret": secret}, repr=not secret)


@dataclass(frozen=True)
class Settings:
    """Every field is an environment variable: PREREAD_ and the field's name in capitals."""

    data_dir: Path = _setting(  # noqa: RUF009 - makes a field
        Path("data"), "the folder of what this machine keeps: catalogue, objects, caches, secret, unless they are elsewhere"
    )
    host: str = _setting("127.0.0.1", "the address that the API listens on")
    port: int = _setting(8321, "the API's port")
    # Where things live.
    database_url: str = _setting("", "the catalogue: sqlite:///… or postgresql+psycopg://…; empty: SQLite in the data folder")
    object_store: str = _setting("", "where bytes live: a folder, or s3://bucket/prefix; empty: in the data folder")
    s3_endpoint: str = _setting("", "the S3 server's address; empty: Amazon's")
    s3_access_key: str = _setting("", "S3 access key; empty: the environment's own credentials", secret=True)
    s3_secret_key: str = _setting("", "S3 secret key", secret=True)
    s3_region: str = _setting("us-east-1", "S3 region")
    encryption_keys: str = _setting(
        "", "secrets, newest first, or `master`: objects are encrypted before they leave (docs/encryption.md)", secret=True
    )
    broker_url: str = _setting("", "redis://…; empty: the local broker that `preread up` starts")
    secret: str = _setting("", "master secret of API keys and KV keys; empty: made once in the data folder", secret=True)
    # A parent site; both or neither.
    parent_url: str = _setting("", "https://…: the parent site that has stored KV for this one (docs/sites.md)")
    parent_key: str = _setting("", "what `preread site add` has printed at the parent", secret=True)
    # The models.
    model: str = _setting("embedded", "the reader: a model's folder, or `embedded`")
    embedder: str = _setting("embedded", "the embedding model: a folder, or `embedded`")
    reranker: str = _setting("", "a cross-encoder's folder; empty: searches are not reranked")
    device: str = _setting("cpu", "where models compute: cpu, cuda, cuda:1, …")
    dtype: str = _setting("bfloat16", "what models compute in: bfloat16, float16 or float32")
    codec: str = _setting("", "how KV is written; empty: `transform` in S3, where bytes cost, `raw` in a folder")
    threads: int = _setting(0, "threads of a model; 0: as many as the machine has cores")
    engine: str = _setting("torch", "who computes answers, and chunks' KV: torch, in the process itself, or vllm (docs/vllm.md)")
    vllm_url: str = _setting("http://127.0.0.1:8000", "where vLLM answers, for the engine `vllm`")
    # Chunking, retrieval and prompts.
    chunk_tokens: int = _setting(400, "tokens of a chunk at most")
    context_tokens: int = _setting(4096, "tokens of all chunks retrieved for a question")
    top_k: int = _setting(8, "chunks retrieved for a question")
    method: str = _setting("default", "how prompts are blended where a request does not say")
    # Bounds.
    max_requests: int = _setting(8, "answered at once by one engine; more wait in a queue of four times as many")
    memory_cache_bytes: int = _setting(512 << 20, "stored KV that was read last, in memory")
    disk_cache_bytes: int = _setting(
        -1, "the same on disk, in the data folder; -1: 8 GiB in front of S3, none in front of a folder"
    )
    blended_cache_bytes: int = _setting(256 << 20, "blended prompts, for a conversation's next turn")
    canary_share: float = _setting(0.01, "share of the answers that are compared with full prefill when the engine is idle")
    max_upload_bytes: int = _setting(512 << 20, "bytes of one upload at most, and of a file that is read and is no archive")
    lease_seconds: float = _setting(60.0, "how long a worker that does not answer keeps its file")
    tick_seconds: float = _setting(2.0, "how often the beat looks for what is due")
    # What the operator says.
    policy_file: str = _setting("", "the operator's rules for stored KV, read again when the file changes (docs/policies.md)")
    oidc_file: str = _setting("", "who may log in to the page, and as what, YAML; empty: keys only (docs/access.md)")
    source_roots: str = _setting("", "folders, split by `:`, from which corpora may be synced; empty: none")
    allowed_hosts: str = _setting(
        "", "hosts, split by commas, where sources and webhooks may lead; empty: nowhere (docs/sources.md)"
    )

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


_DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Settings)}


def codec_for(objects: str) -> str:
    """The codec for an object store: a local disk gives raw KV as fast as memory, a network is waited for by the byte."""
    return "transform" if objects.startswith("s3://") else "raw"


def load_settings(environ: Mapping[str, str] | None = None, **overrides: object) -> Settings:
    """Settings from the environment, and from the file that PREREAD_CONFIG names for what the environment does not say.
    Raises UserError for an unknown name (with its nearest) or a bad value."""
    given = {name: one.value for name, one in given_settings(environ).items()}
    settings = Settings(**{**given, **{k: v for k, v in overrides.items() if v is not None}})
    return _checked(settings)


@dataclass(frozen=True)
class Given:
    """A setting that somebody has set, and where: a variable's name, or a file's."""

    value: Any
    where: str


def given_settings(environ: Mapping[str, str] | None = None) -> dict[str, Given]:
    """All that are set, by field. Raises UserError as `load_settings` does, but does not check them together."""
    env = os.environ if environ is None else environ
    found = {}
    if path := env.get(CONFIG):
        for name, value in _read_file(Path(path)).items():
            known = _known(name, f"{name!r} in {path}", str)
            found[known] = Given(_of_file(path, known, value), path)
    for name, text in env.items():
        if name.startswith(PREFIX) and name != CONFIG:
            named = _known(name.removeprefix(PREFIX).lower(), name, lambda near: PREFIX + near.upper())
            found[named] = Given(_convert(name, text, _DEFAULTS[named]), name)
    return found


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{CONFIG}: {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{CONFIG}: {path} is not TOML: {error}") from None


def _of_file(path: str, name: str, value: Any) -> Any:
    kind: Any = type(_DEFAULTS[name])
    wanted = str if issubclass(kind, Path) else kind
    if type(value) is not wanted and not (wanted is float and type(value) is int):
        raise UserError(f"{name} in {path} is {value!r}, but must be a {wanted.__name__}")
    return kind(value)


def _known(name: str, shown: str, spelt: Callable[[str], str]) -> str:
    if name in _DEFAULTS:
        return name
    near = difflib.get_close_matches(name, _DEFAULTS, n=1)
    raise UserError(f"unknown setting {shown}" + (f"; did you mean {spelt(near[0])}?" if near else ""))


def _checked(settings: Settings) -> Settings:
    if settings.codec and settings.codec not in CODEC_NAMES:
        raise UserError(f"{PREFIX}CODEC is one of {', '.join(CODEC_NAMES)}, not {settings.codec!r}")
    if settings.dtype not in DTYPES:
        raise UserError(f"{PREFIX}DTYPE is one of {', '.join(DTYPES)}, not {settings.dtype!r}")
    if settings.engine not in ENGINES:
        raise UserError(f"{PREFIX}ENGINE is one of {', '.join(ENGINES)}, not {settings.engine!r}")
    if settings.engine == "vllm" and not settings.vllm_url.startswith(("http://", "https://")):
        raise UserError(f"{PREFIX}VLLM_URL is an address with http:// or https://, not {settings.vllm_url!r}")
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


def data_folder(settings: Settings) -> Path:
    """The data folder, made if need be. Documents and the master secret lie in it, so other users of the machine have no way
    in: also where it was open to them. One that belongs to another user is as its owner has made it."""
    folder = settings.data_dir
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(PermissionError):
        folder.chmod(0o700)
    return folder


def master_secret(settings: Settings) -> bytes:
    """The secret under which API keys and KV keys are HMACs: from the settings, or made once in the data folder."""
    if settings.secret:
        return settings.secret.encode()
    path = data_folder(settings) / "secret"
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
