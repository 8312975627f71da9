from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_work import Work, make_work


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    made = make_work(tmp_path)
    yield made
    made.catalogue.close()
