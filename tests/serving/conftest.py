from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from api_kit import Site, running_site
from engine_kit import EngineSite
from fixtures_models import Models
from model_kit import Service, Shared, serving

from precompute.embedded import embedded_model
from serving.engine import rates
from storage.errors import ModelUnsupported

MODELS = Path(__file__).parents[2] / "build" / "test-models"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine reading three small objects may take longer than computing them. Those who ask for less say so."""
    monkeypatch.setattr(rates, "FLOOR_S", 20.0)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with running_site(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model's folder, converted once per checkout."""
    try:
        return embedded_model(MODELS)
    except ModelUnsupported as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def shared(embedded_folder: Path) -> Iterator[Shared]:
    threads = torch.get_num_threads()
    yield Shared(embedded_folder)
    torch.set_num_threads(threads)


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
