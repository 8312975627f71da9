"""Filters on a document's attributes, in the grammar of the OpenAI vector-store API.

`{"type": "eq", "key": "team", "value": "blue"}` with eq, ne, gt, gte, lt, lte, in, nin, joined by
`{"type": "and", "filters": [...]}` and "or". A document without the key equals nothing: `ne` and `nin` hold
for it, all else does not. Numbers compare with numbers, texts with texts, truth values only for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from storage.errors import UserError

Value = str | float | bool
DEEPEST = 16
MOST_CLAUSES = 256


def _same(left: object, right: object) -> bool:
    return _kind(left) == _kind(right) and left == right


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[object, object], bool]:
    return lambda left, right: _kind(left) == _kind(right) != "truth" and compare(left, right)


COMPARE: Mapping[str, Callable[[object, object], bool]] = {
    "eq": _same,
    "ne": lambda left, right: not _same(left, right),
    "gt": _ordered(lambda left, right: left > right),
    "gte": _ordered(lambda left, right: left >= right),
    "lt": _ordered(lambda left, right: left < right),
    "lte": _ordered(lambda left, right: left <= right),
    "in": lambda left, right: isinstance(right, list) and any(_same(left, one) for one in right),
    "nin": lambda left, right: isinstance(right, list) and not any(_same(left, one) for one in right),
}
JOIN: Mapping[str, Callable[[Any], bool]] = {"and": all, "or": any}


def matches(filters: Mapping[str, Any] | None, attributes: Mapping[str, Any]) -> bool:
    """Whether a document with these attributes passes a filter that `check` let through."""
    if filters is None:
        return True
    kind = filters["type"]
    if kind in JOIN:
        return JOIN[kind](matches(each, attributes) for each in filters["filters"])
    held = attributes.get(filters["key"])
    if held is None:
        return kind in ("ne", "nin")
    return COMPARE[kind](held, filters["value"])


def check(filters: object) -> None:
    """Raise UserError unless `filters` is None or a well-formed filter."""
    if filters is not None:
        _check(filters, depth=1, budget=[MOST_CLAUSES])


def _check(filters: object, depth: int, budget: list[int]) -> None:
    budget[0] -= 1
    if depth > DEEPEST or budget[0] < 0:
        raise UserError(f"A filter may be {DEEPEST} levels deep and have {MOST_CLAUSES} clauses.")
    if not isinstance(filters, Mapping):
        raise UserError('A filter is an object such as {"type": "eq", "key": "team", "value": "blue"}.')
    kind = filters.get("type")
    if isinstance(kind, str) and kind in JOIN:
        _check_fields(filters, {"type", "filters"})
        if not isinstance(filters["filters"], list) or not filters["filters"]:
            raise UserError(f'A filter of type "{kind}" needs a list "filters" with at least one filter.')
        for each in filters["filters"]:
            _check(each, depth + 1, budget)
    elif isinstance(kind, str) and kind in COMPARE:
        _check_comparison(filters, kind)
    else:
        raise UserError(f"A filter's type is one of {', '.join([*COMPARE, *JOIN])}; not {kind!r}.")


def _check_comparison(filters: Mapping[str, Any], kind: str) -> None:
    _check_fields(filters, {"type", "key", "value"})
    value = filters["value"]
    if not isinstance(filters["key"], str):
        raise UserError("A filter's key is the name of an attribute.")
    if kind in ("in", "nin"):
        if not isinstance(value, list) or not all(_kind(one) for one in value):
            raise UserError(f'A filter of type "{kind}" needs a list of texts, numbers or truth values.')
    elif not _kind(value):
        raise UserError(f'A filter of type "{kind}" needs a text, a number or a truth value.')


def _check_fields(filters: Mapping[str, Any], fields: set[str]) -> None:
    if set(filters) != fields:
        raise UserError(f"A filter of type {filters['type']!r} has the fields {', '.join(sorted(fields))}.")


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else ""
