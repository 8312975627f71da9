"""Who may see a document: said the same in Python and by every database."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import insert, select

from storage.access import is_open, is_open_to
from storage.catalogue.engine import migrate, open_catalogue
from storage.catalogue.schema import ApiKey, Tenant

NAMES = ["x", ", ", '"', "\\", "a", "A", "ä", "[", "x\\", '", "', "key-1"]
LISTS = [None, [], ["x"], ['foo"x'], ['foo", "x'], ["a", "b"], ["a\\"], ["\\", '"'], ["ä"], ["A", "key-12"], ["x, y"]]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalogue.db'}"
    return str(request.getfixturevalue("postgres_url"))


def test_a_list_opens_to_its_own_names_alone(url: str) -> None:
    migrate(url)
    catalogue = open_catalogue(url)
    with catalogue.write() as session:
        session.add(Tenant(id="t", name="t", created_at=0.0))
        session.flush()
        for number, listed in enumerate(LISTS):  # a column of the same kind, which needs no corpus and no file
            texts = {"id": str(number), "tenant_id": "t", "name": "k", "mac": str(number), "hint": ""}
            session.execute(insert(ApiKey).values(**texts, scopes=[], created_at=0.0, principals=listed))
    with catalogue.read() as session:
        for names in [(), *((name,) for name in NAMES), tuple(NAMES)]:
            found = {int(i) for i in session.scalars(select(ApiKey.id).where(is_open_to(ApiKey.principals, names)))}
            assert found == {i for i, listed in enumerate(LISTS) if is_open(listed, names)}, names
            assert found == {i for i, listed in enumerate(LISTS) if listed is None or set(listed) & set(names)}, names
    catalogue.close()
