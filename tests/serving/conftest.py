from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_kit import Site, running_site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with running_site(tmp_path) as made:
        yield made
