"""A small library in each real database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from small_library import Library


@pytest.fixture
def library(catalogue_url: str) -> Iterator[Library]:
    library = Library(catalogue_url)
    library.index.ensure()
    library.corpus("vs_1")
    yield library
    library.catalogue.close()
