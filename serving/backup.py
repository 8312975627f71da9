"""A backup folder: the catalogue as of one moment, the objects it speaks of, and a manifest that is written last.

The catalogue is copied by its database's own means (SQLite's online backup, `pg_dump`), and first: what is deleted while
the objects are copied is absent from the backup and counted, what is added meanwhile is an orphan there. Objects are copied
as they lie, encrypted ones encrypted. Stored KV is left out unless asked for: it can be computed again from the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from ingest.files import Pieces
from serving.cli_client import ADMIN_KEY
from serving.settings import Settings, data_folder
from storage.catalogue import sqlite
from storage.catalogue.engine import Catalogue, migrate, open_catalogue, parse_url
from storage.catalogue.schema import Tenant
from storage.errors import ObjectMissing, StorageUnavailable, UserError
from storage.names import check_name
from storage.objects import open_store
from storage.types import ObjectStore

FORMAT = 1
MANIFEST, DIGESTS, OBJECTS, PRIVATE = "manifest.json", "objects.sha256", "objects", "private"
SECRET = "secret"
KEPT = (SECRET, ADMIN_KEY, "credentials/*")  # of the data folder, where they are: without the secret no key is good again
KV = "kv/"
PIECE = 8 << 20


@dataclass(frozen=True)
class Backup:
    """What a manifest says. Digests are SHA-256; `private` has one by name for what was in the data folder."""

    format: int
    made_at: float
    dialect: str
    catalogue: str
    private: dict[str, str]
    objects: int
    bytes: int
    gone: int  # objects deleted while they were to be copied
    kv: bool
    digests: str  # SHA-256 of the list of the objects' own


def back_up(settings: Settings, folder: Path, *, kv: bool) -> Backup:
    """Copy an installation, which may be running, into an empty folder. Raises UserError, StorageUnavailable."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: name a folder that is, or that is not there yet")
    with _private_files():
        return _back_up(settings, folder, kv)


@contextmanager
def _private_files() -> Iterator[None]:
    """What this process and its children make is its owner's only, wherever it is carried: documents, perhaps the secret."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _back_up(settings: Settings, folder: Path, kv: bool) -> Backup:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    catalogue = open_catalogue(settings.database)
    try:
        copy = _dump(catalogue, settings.database, folder)
    finally:
        catalogue.close()
    private = {name: _copy_private(settings.data_dir / name, folder / PRIVATE / name) for name in _private(settings)}
    objects, size, gone = _copy_objects(_store(settings), folder, kv)
    digests = _digest(folder / DIGESTS)
    made = Backup(FORMAT, time.time(), catalogue.dialect, _digest(copy), private, objects, size, gone, kv, digests)
    _write(folder / MANIFEST, json.dumps(asdict(made)).encode())
    return made


def restore(settings: Settings, folder: Path) -> Backup:
    """Put a backup into an installation that holds nothing yet: its catalogue last. Every byte is checked before the first is
    written. Raises UserError, StorageUnavailable."""
    made = _manifest(folder)
    dialect = "sqlite" if parse_url(settings.database).get_backend_name() == "sqlite" else "postgresql"
    if made.dialect != dialect:
        raise UserError(f"the backup's catalogue is of {made.dialect}, and PREREAD_DATABASE_URL names {dialect}")
    _check(made, folder)
    _refuse_if_used(settings.database)
    with _private_files():
        return _restore(settings, folder, made, dialect)


def _restore(settings: Settings, folder: Path, made: Backup, dialect: str) -> Backup:
    _restore_private(settings, folder, made)
    store = _store(settings)
    for name, _ in _listed(folder):
        with _path(folder, name).open("rb") as file:
            store.put(name, Pieces(file))
    _load(settings.database, dialect, folder)
    migrate(settings.database)
    return made


# --- the catalogue ---


def _dump(catalogue: Catalogue, url: str, folder: Path) -> Path:
    """Raises UserError if there is no catalogue yet, so that a mistyped folder is not backed up as an empty one."""
    if catalogue.dialect == "postgresql":
        copy = folder / "catalogue.dump"
        _run("pg_dump", ["--format=custom", "--no-owner", "--file", str(copy)], url)
        return copy
    path = Path(str(parse_url(url).database))
    if not path.exists():
        raise UserError(f"there is no catalogue at {path}: is PREREAD_DATA_DIR the folder of an installation?")
    copy = folder / "catalogue.db"
    source, target = sqlite.driver().connect(str(path)), sqlite.driver().connect(str(copy))
    try:
        source.backup(target)
    finally:
        source.close()
        target.close()
    return copy


def _load(url: str, dialect: str, folder: Path) -> None:
    if dialect == "postgresql":
        _run("pg_restore", ["--no-owner", "--exit-on-error", "--single-transaction", str(folder / "catalogue.dump")], url)
        return
    path = Path(str(parse_url(url).database))
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        leftover.unlink(missing_ok=True)  # of an empty catalogue
    fresh = path.with_name(path.name + ".restored")
    shutil.copyfile(folder / "catalogue.db", fresh)
    os.replace(fresh, path)


def _run(program: str, arguments: list[str], url: str) -> None:
    """PostgreSQL's own tool; the password goes by its environment, where `ps` does not show it."""
    parsed = parse_url(url).set(drivername="postgresql")
    password = parsed.password
    place = parsed.set(password=None).render_as_string(hide_password=False)
    environ = os.environ | ({"PGPASSWORD": str(password)} if password else {})
    command = [program, f"--dbname={place}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    except FileNotFoundError:
        raise UserError(f"{program} is needed for a PostgreSQL catalogue: install PostgreSQL's client programs") from None
    if done.returncode:
        raise StorageUnavailable(f"{program} failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ''}")


def _refuse_if_used(url: str) -> None:
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).exists():
        return
    catalogue = open_catalogue(url)
    try:
        with catalogue.read() as session:
            tables = session.connection().dialect.has_table(session.connection(), Tenant.__tablename__)
            used = tables and session.scalar(select(func.count()).select_from(Tenant))
    finally:
        catalogue.close()
    if used or (tables and parsed.get_backend_name() != "sqlite"):
        raise UserError("this installation's catalogue is in use: restore into one that holds nothing")


# --- objects ---


def _store(settings: Settings) -> ObjectStore:
    """Without decryption: what is encrypted stays so."""
    keys = {name: getattr(settings, name) or None for name in ("s3_endpoint", "s3_access_key", "s3_secret_key")}
    return open_store(settings.objects, **keys, s3_region=settings.s3_region)


def _copy_objects(store: ObjectStore, folder: Path, kv: bool) -> tuple[int, int, int]:
    """How many, their bytes, and how many were gone when their turn came."""
    count = total = gone = 0
    with (folder / DIGESTS).open("w") as digests:
        for name in store.list(""):
            if name.startswith(KV) and not kv:
                continue
            try:
                digest, size = _copy_object(store, name, _path(folder, name))
            except ObjectMissing:
                gone += 1
                continue
            digests.write(f"{digest}  {name}\n")
            count, total = count + 1, total + size
    return count, total, gone


def _copy_object(store: ObjectStore, name: str, path: Path) -> tuple[str, int]:
    size = store.size(name)
    if size is None:
        raise ObjectMissing(name)
    digest, buffer, at = hashlib.sha256(), memoryview(bytearray(min(PIECE, max(size, 1)))), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while at < size:
            piece = buffer[: store.read_into(name, buffer[: size - at], at)]
            if not piece:
                raise StorageUnavailable(f"{name} ended early")
            digest.update(piece)
            file.write(piece)
            at += len(piece)
    return digest.hexdigest(), size


def _listed(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and digests."""
    with (folder / DIGESTS).open() as lines:
        for line in lines:
            digest, _, name = line.rstrip("\n").partition("  ")
            yield check_name(name), digest


def _path(folder: Path, name: str) -> Path:
    return folder / OBJECTS / name


# --- private files and the manifest ---


def _private(settings: Settings) -> list[str]:
    found = (path for pattern in KEPT for path in sorted(settings.data_dir.glob(pattern)) if path.is_file())
    return [path.relative_to(settings.data_dir).as_posix() for path in found]


def _copy_private(source: Path, target: Path) -> str:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(target, source.read_bytes())
    return _digest(target)


def _restore_private(settings: Settings, folder: Path, made: Backup) -> None:
    """Another secret is refused before anything is written: with it no API key and no stored KV could be used again."""
    target, kept = settings.data_dir / SECRET, folder / PRIVATE / SECRET
    here = settings.secret.encode() or (target.read_bytes().strip() if target.exists() else b"")
    if SECRET in made.private and here not in (b"", kept.read_bytes().strip()):
        raise UserError("the backup has another secret than this installation: unset PREREAD_SECRET, and remove its `secret`")
    if SECRET not in made.private and not here:
        raise UserError("the backup is of an installation whose secret was set: set the same PREREAD_SECRET")
    data_folder(settings)
    for name in made.private:
        _copy_private(folder / PRIVATE / name, settings.data_dir / name)


def _manifest(folder: Path) -> Backup:
    try:
        told: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        made = Backup(**told)
    except FileNotFoundError:
        raise UserError(f"{folder} is no whole backup: it has no {MANIFEST}, which is written last") from None
    except (ValueError, TypeError):
        raise UserError(f"{folder / MANIFEST} is damaged, or of another version") from None
    if made.format != FORMAT:
        raise UserError(f"the backup is of format {made.format}; this version reads format {FORMAT}")
    return made


def _check(made: Backup, folder: Path) -> None:
    copy = folder / ("catalogue.db" if made.dialect == "sqlite" else "catalogue.dump")
    private = ((folder / PRIVATE / name, digest) for name, digest in made.private.items())
    for path, digest in ((copy, made.catalogue), (folder / DIGESTS, made.digests), *private):
        _check_one(folder, path, digest)
    for name, digest in _listed(folder):  # a list that is whole by now
        _check_one(folder, _path(folder, name), digest)


def _check_one(folder: Path, path: Path, digest: str) -> None:
    if not path.is_file() or _digest(path) != digest:
        raise UserError(f"the backup is damaged: {path.relative_to(folder)} is not what was written; nothing was restored")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and for its owner only."""
    fresh = path.with_name(path.name + ".part")
    descriptor = os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
