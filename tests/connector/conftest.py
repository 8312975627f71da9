from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures_models import Models
from vllm_kit import VLLM, Installation, small_reader

LENGTHS = (70, 45, 120, 33, 90)


@pytest.fixture(scope="session")
def installation(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(small_reader(tiny_models), tmp_path_factory.mktemp("installation"), LENGTHS)


@pytest.fixture(scope="session")
def vllm(installation: Installation) -> Iterator[VLLM]:
    engine = VLLM(installation.reader.folder, installation.data)
    yield engine
    engine.close()
