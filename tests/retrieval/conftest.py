"""A small library in each real database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_library import Library

from storage.catalogue.engine import migrate


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = (
        f"sqlite:///{tmp_path}/catalogue.db"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres_url")
    )
    migrate(str(url))
    return str(url)


@pytest.fixture
def library(url: str) -> Iterator[Library]:
    library = Library(url)
    library.index.ensure()
    library.corpus("vs_1")
    yield library
    library.catalogue.close()
