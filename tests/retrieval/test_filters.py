"""The filter grammar, clause by clause."""

from __future__ import annotations

import pytest

from retrieval.filters import check, matches
from storage.errors import UserError

HELD = {"team": "blue", "year": 2020, "score": 0.5, "open": True}


def one(kind: str, key: str, value: object) -> dict[str, object]:
    return {"type": kind, "key": key, "value": value}


@pytest.mark.parametrize(
    ("kind", "key", "value", "expected"),
    [
        ("eq", "team", "blue", True),
        ("eq", "team", "red", False),
        ("eq", "year", 2020.0, True),
        ("eq", "open", True, True),
        ("eq", "open", 1, False),
        ("eq", "year", "2020", False),
        ("eq", "none", "x", False),
        ("ne", "team", "red", True),
        ("ne", "team", "blue", False),
        ("ne", "none", "x", True),
        ("gt", "year", 2019, True),
        ("gt", "year", 2020, False),
        ("gte", "year", 2020, True),
        ("gt", "year", "a", False),
        ("lt", "score", 1, True),
        ("lt", "score", 0.5, False),
        ("lte", "score", 0.5, True),
        ("lte", "none", 9, False),
        ("gt", "team", "black", True),
        ("gt", "open", False, False),
        ("in", "team", ["red", "blue"], True),
        ("in", "team", [], False),
        ("in", "none", ["x"], False),
        ("nin", "team", ["red"], True),
        ("nin", "team", ["blue"], False),
        ("nin", "none", ["x"], True),
    ],
)
def test_comparisons(kind: str, key: str, value: object, expected: bool) -> None:
    clause = one(kind, key, value)
    check(clause)
    assert matches(clause, HELD) is expected


def test_joins_nest() -> None:
    blue, red, late = one("eq", "team", "blue"), one("eq", "team", "red"), one("gt", "year", 2010)
    either = {"type": "or", "filters": [red, {"type": "and", "filters": [blue, late]}]}
    check(either)
    assert matches(either, HELD)
    assert not matches({"type": "and", "filters": [either, red]}, HELD)
    assert matches(None, HELD)


DEEP: dict[str, object] = one("eq", "a", 1)
for _ in range(1000):
    DEEP = {"type": "and", "filters": [DEEP]}


@pytest.mark.parametrize(
    "filters",
    [
        [],
        "eq",
        1,
        {},
        {"type": []},
        {"type": "like", "key": "a", "value": "b"},
        one("eq", 3, "b"),  # type: ignore[arg-type]
        one("eq", "a", None),
        one("eq", "a", ["b"]),
        one("in", "a", "b"),
        one("in", "a", [None]),
        {"type": "eq", "key": "a"},
        {"type": "and"},
        {"type": "or", "filters": []},
        {"type": "and", "filters": [{}]},
        one("eq", "a", 1) | {"x": 1},
        DEEP,
        {"type": "or", "filters": [one("eq", "a", 1)] * 1000},
    ],
)
def test_a_malformed_filter_is_refused(filters: object) -> None:
    with pytest.raises(UserError):
        check(filters)
