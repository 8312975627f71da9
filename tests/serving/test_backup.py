"""A backup of a running installation, restored elsewhere, is that installation; a damaged one changes nothing."""

from __future__ import annotations

import io
import json
import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fixtures_postgres
import pytest
from api_kit import SECRET, EchoEngine, Site, make_parts, running
from sqlalchemy import func, select

from ingest.files import raw_name, store_file
from serving.api.app import build_app
from serving.backup import back_up, restore
from serving.settings import Settings
from storage.catalogue.engine import migrate, open_catalogue
from storage.catalogue.schema import ChunkRow, Document, File, Tenant
from storage.errors import UserError
from storage.folder import FolderStore
from storage.sealed import SealedStore

KEPT_SECRET = "s" * 64


@pytest.fixture
def settings(site: Site) -> Settings:
    """Of the running site, which has the usual files in its data folder."""
    folder = site.parts.settings.data_dir
    (folder / "secret").write_text(KEPT_SECRET)
    (folder / "admin.key").write_text(site.admin_key)
    site.parts.objects.put("kv/aa/" + "a" * 64, [b"stored kv"])
    return Settings(data_dir=folder)


@pytest.fixture
def corpus(site: Site) -> str:
    return site.corpus_of("c", {"a.txt": "zebra crossing", "b/ü.txt": "the fee is ten euros"})


def restored(folder: Path, key: str) -> Iterator[Site]:
    engine, rung = EchoEngine(), []  # type: tuple[EchoEngine, list[str]]
    parts, work = make_parts(folder, engine, rung)
    with running(build_app(parts)) as url:
        yield Site(url, parts, engine, work, key, rung)
    parts.catalogue.close()


def test_what_is_restored_answers_as_the_original_did(
    site: Site, settings: Settings, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    backup, elsewhere = tmp_path_factory.mktemp("b") / "backup", tmp_path_factory.mktemp("e") / "data"
    made = back_up(settings, backup, kv=False)
    assert (made.gone, made.kv) == (0, False)
    assert not (backup / "objects" / "kv").exists()
    restore(Settings(data_dir=elsewhere), backup)
    assert (elsewhere / "secret").read_text() == KEPT_SECRET
    assert (elsewhere / "secret").stat().st_mode & 0o77 == 0 == backup.stat().st_mode & 0o77
    key = (elsewhere / "admin.key").read_text()
    for other in restored(elsewhere, key):
        with site.http() as before, other.http() as after:
            for path in ("/v1/vector_stores", "/v1/files", f"/v1/vector_stores/{corpus}/files"):
                assert after.get(path).json() == before.get(path).json()
            asked = {"query": "what is the fee"}
            found = after.post(f"/v1/vector_stores/{corpus}/search", json=asked).json()["data"]
            assert found == before.post(f"/v1/vector_stores/{corpus}/search", json=asked).json()["data"]
            assert found[0]["filename"] == "b/ü.txt"
            content = f"/v1/files/{found[0]['file_id']}/content"
            assert after.get(content).content == b"the fee is ten euros" == before.get(content).content
        more = other.corpus_of("later", {"new.txt": "a new one"})
        with other.http() as after:
            asked = {"query": "a new one"}
            assert after.post(f"/v1/vector_stores/{more}/search", json=asked).json()["data"][0]["filename"] == "new.txt"


def test_stored_kv_goes_along_if_asked_for(settings: Settings, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("b")
    back_up(settings, folder, kv=True)
    restore(Settings(data_dir=folder / "data"), folder)
    name, buffer = "kv/aa/" + "a" * 64, bytearray(9)
    assert FolderStore(folder / "data" / "objects").read_into(name, memoryview(buffer)) == 9
    assert buffer == b"stored kv"


def test_a_large_object_is_never_in_memory_whole(
    site: Site, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, piece, pieces = tmp_path_factory.mktemp("b"), bytes(range(256)) * 4096, 48
    site.parts.objects.put("raw/aa/large", [piece] * pieces)
    back_up(settings, folder, kv=False)
    tracemalloc.start()
    try:
        restore(Settings(data_dir=folder / "data"), folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < pieces * len(piece) / 2
    buffer = bytearray(pieces * len(piece))
    assert FolderStore(folder / "data" / "objects").read_into("raw/aa/large", memoryview(buffer)) == len(buffer)
    assert buffer == piece * pieces


def test_a_backup_made_while_files_arrive_and_go_is_whole(
    site: Site, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stop, parts = threading.Event(), site.parts

    def upload() -> None:
        number = 0
        while not stop.is_set():
            store_file(parts.catalogue, parts.objects, "default", f"{number}.txt", io.BytesIO(b"%d" % number * 50))
            number += 1

    thread = threading.Thread(target=upload)
    thread.start()
    try:
        for number in range(3):
            folder = tmp_path_factory.mktemp("b")
            back_up(settings, folder, kv=False)
            restore(Settings(data_dir=folder / f"data{number}"), folder)
            held = FolderStore(folder / f"data{number}" / "objects")
            catalogue = open_catalogue(f"sqlite:///{folder}/data{number}/catalogue.db")
            with catalogue.read() as session:
                assert session.connection().exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
                files = session.scalars(select(File)).all()
            catalogue.close()
            assert all(held.size(raw_name(file.tenant_id, file.sha256)) == file.bytes for file in files)
    finally:
        stop.set()
        thread.join()
    assert files


def test_what_is_deleted_meanwhile_is_counted_and_not_there(
    settings: Settings, corpus: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = FolderStore.list
    monkeypatch.setattr(FolderStore, "list", lambda self, prefix: iter([*listed(self, prefix), "raw/0/gone"]))
    made = back_up(settings, tmp_path_factory.mktemp("b"), kv=False)
    assert (made.objects, made.gone) == (2, 1)


DAMAGES = {
    "catalogue.db": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x01"),
    "private/secret": lambda path: path.write_text("t" * 64),
    "objects.sha256": lambda path: path.write_text(path.read_text().replace("raw", "row")),
    "manifest.json": lambda path: path.write_text(path.read_text()[:-3]),
    "objects": lambda path: next(path.rglob("[0-9a-f]" * 64)).write_bytes(b"other"),
}


@pytest.mark.parametrize("what", [*DAMAGES, "a file that is missing", "no manifest", "another format"])
def test_a_damaged_backup_is_refused_before_anything_is_written(
    settings: Settings, corpus: str, what: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, elsewhere = tmp_path_factory.mktemp("b"), tmp_path_factory.mktemp("e") / "data"
    back_up(settings, folder, kv=False)
    if what in DAMAGES:
        DAMAGES[what](folder / what)
    elif what == "no manifest":
        (folder / "manifest.json").unlink()
    elif what == "another format":
        told = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**told, "format": 2}))
    else:
        next((folder / "objects").rglob("[0-9a-f]" * 64)).unlink()
    with pytest.raises(UserError, match=r"damaged|no whole backup|format 2"):
        restore(Settings(data_dir=elsewhere), folder)
    assert not elsewhere.exists()


def test_nothing_is_restored_over_an_installation_in_use_and_no_backup_over_files(
    site: Site, settings: Settings, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("b")
    back_up(settings, folder, kv=False)
    with pytest.raises(UserError, match="in use"):
        restore(settings, folder)
    with pytest.raises(UserError, match="not empty"):
        back_up(settings, folder, kv=False)
    with pytest.raises(UserError, match="no catalogue"):
        back_up(Settings(data_dir=folder / "mistyped"), tmp_path_factory.mktemp("c"), kv=False)
    with site.http() as http:
        assert len(http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]) == 2


@pytest.mark.parametrize(("here", "said"), [("x" * 40, "another secret"), (KEPT_SECRET, "")])
def test_a_backup_of_another_secret_is_refused(
    settings: Settings, here: str, said: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("b")
    back_up(settings, folder, kv=False)
    target = Settings(data_dir=folder / "data", secret=here)
    if not said:
        restore(target, folder)
        return
    with pytest.raises(UserError, match=said):
        restore(target, folder)
    assert not (folder / "data").exists()


def test_a_secret_that_the_settings_hold_is_not_in_the_backup_and_is_asked_for(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("b")
    back_up(Settings(data_dir=site.parts.settings.data_dir, secret=KEPT_SECRET), folder, kv=False)
    assert not any(KEPT_SECRET.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    with pytest.raises(UserError, match="PREREAD_SECRET"):
        restore(Settings(data_dir=folder / "data"), folder)
    restore(Settings(data_dir=folder / "data", secret=KEPT_SECRET), folder)


def test_what_is_encrypted_stays_so(site: Site, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> None:
    SealedStore(site.parts.objects, [SECRET], lambda _: "t").put("raw/0/sealed", [b"plain words of a contract"])
    folder = tmp_path_factory.mktemp("b")
    back_up(settings, folder, kv=False)
    restore(Settings(data_dir=folder / "data"), folder)
    sealed = SealedStore(FolderStore(folder / "data" / "objects"), [SECRET], lambda _: "t")
    held: list[Any] = []
    sealed.read_all("raw/0/sealed", lambda size: held.append(bytearray(size)) or memoryview(held[-1]))
    assert held[-1] == b"plain words of a contract"
    assert not any(b"plain words" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_backup_and_what_is_restored_are_their_owners_only(
    site: Site, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site.corpus_of("handbook", {"a.txt": "Invoices are due after thirty days."})
    folder = tmp_path_factory.mktemp("b")
    before = os.umask(0o022)
    try:
        back_up(settings, folder / "backup", kv=True)
        restore(Settings(data_dir=folder / "there"), folder / "backup")
        assert os.umask(0o022) == 0o022, "the process makes its other files as before"
    finally:
        os.umask(before)
    made = list(folder.rglob("*"))
    assert {"catalogue.db", "secret", "admin.key", "manifest.json"} <= {path.name for path in made}
    assert not [path for path in made if path.stat().st_mode & 0o077]


@pytest.mark.services
def test_a_catalogue_in_postgresql_goes_by_its_own_tools(
    postgres_server: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    monkeypatch.setenv("PATH", "/nowhere")
    migrate(postgres_url)
    catalogue = open_catalogue(postgres_url)
    with catalogue.write() as session:
        session.add(Tenant(id="t", name="ü", created_at=1.5))
    catalogue.close()
    here = Settings(data_dir=tmp_path / "here", database_url=postgres_url, secret=KEPT_SECRET)
    with pytest.raises(UserError, match="pg_dump"):
        back_up(here, tmp_path / "none", kv=False)
    monkeypatch.setenv("PATH", str(fixtures_postgres._binaries()))
    back_up(here, tmp_path / "backup", kv=False)
    with pytest.raises(UserError, match="in use"):
        restore(here, tmp_path / "backup")
    with pytest.raises(UserError, match="postgresql"):
        restore(Settings(data_dir=tmp_path / "sqlite", secret=KEPT_SECRET), tmp_path / "backup")
    server = postgres_server.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS there")
        connection.execute("CREATE DATABASE there")
        there = Settings(
            data_dir=tmp_path / "there", database_url=postgres_server.replace("/postgres?", "/there?"), secret=KEPT_SECRET
        )
        restore(there, tmp_path / "backup")
        catalogue = open_catalogue(there.database)
        with catalogue.read() as session:
            assert [(row.name, row.created_at) for row in session.scalars(select(Tenant))] == [("ü", 1.5)]
            assert session.scalar(select(func.count()).select_from(Document).join(ChunkRow, isouter=True)) == 0
        catalogue.close()
        connection.execute("DROP DATABASE there WITH (FORCE)")
