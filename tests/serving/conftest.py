from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from api_kit import Site, running_site
from browser_kit import Browser, chromium
from engine_kit import EngineSite
from fixtures_models import Models
from fixtures_s3 import S3Server
from model_kit import Service, Shared, serving
from rude_server import RudeServer
from s3_kit import MakeSite, S3Site, connected, impatient

from serving.engine.torch_engine import TorchEngine
from storage.s3 import S3Store


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine reading three small objects may take longer than computing them. Those who ask for less say so."""
    monkeypatch.setitem(TorchEngine.__init__.__kwdefaults__, "patience_s", 20.0)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with running_site(tmp_path) as made:
        yield made


def threads_given_back(model: Path) -> Iterator[Shared]:
    threads = torch.get_num_threads()
    yield Shared(model)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared(tiny_models: Models) -> Iterator[Shared]:
    """A tiny reader that understands nothing and takes no time, for what hangs on neither."""
    yield from threads_given_back(tiny_models.folder("served", "llama", max_position_embeddings=8192))


@pytest.fixture(scope="session")
def embedded(embedded_folder: Path) -> Iterator[Shared]:
    """The embedded model; a module whose `shared` is this has services with it."""
    yield from threads_given_back(embedded_folder)


@pytest.fixture
def service(tmp_path: Path, shared: Shared) -> Iterator[Service]:
    with serving(shared, tmp_path, dtype="float32") as made:
        yield made


@pytest.fixture
def engine_site(tiny_models: Models, tmp_path: Path) -> Iterator[EngineSite]:
    made = EngineSite(tiny_models.reader("qwen3"), tmp_path / "kv")
    yield made
    made.objects.gate.set()
    made.engine.close()


@pytest.fixture(scope="session")
def rude(s3_server: S3Server) -> Iterator[RudeServer]:
    """What stands before the real S3 server."""
    with RudeServer(upstream=s3_server.endpoint) as server:
        yield server


@pytest.fixture(scope="session")
def s3_stores(s3_server: S3Server, rude: RudeServer) -> Iterator[tuple[S3Store, S3Store]]:
    """The way through the rude server, and past it."""
    stores = connected(s3_server, rude.endpoint, "engine"), connected(s3_server, s3_server.endpoint, "engine")
    stores[1].ensure_bucket()
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def s3_site(
    rude: RudeServer, s3_stores: tuple[S3Store, S3Store], tiny_models: Models, tmp_path: Path
) -> Iterator[MakeSite]:
    """Makes engines over S3. `breaking`: options of `impatient`; the others are EngineSite's."""
    made: list[S3Site] = []

    def make(breaking: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> S3Site:
        through, past = (impatient(store, tmp_path.name, **breaking) for store in s3_stores)
        made.append(S3Site(tiny_models.reader("llama"), rude, through, past, **settings))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture
def browser(driver: Any, site: Site) -> Browser:
    """At the page of `site`, with nothing kept from the test before."""
    made = Browser(driver, site.url)
    driver.get(f"{site.url}/")
    made.run("sessionStorage.clear(); localStorage.clear()")
    made.faults()
    return made
