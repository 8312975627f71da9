"""Arguments of methods, as in `cacheblend:0.15`."""

from __future__ import annotations


def nothing(argument: str) -> None:
    """For methods without an argument. Raises ValueError if there is one."""
    if argument:
        raise ValueError(argument)


def ratio(argument: str) -> float:
    """A share of the stored tokens, 0 < R <= 1."""
    value = float(argument)
    if not 0 < value <= 1:
        raise ValueError(argument)
    return value


def count(argument: str) -> int:
    """A number of tokens, at least 1."""
    value = int(argument)
    if value < 1:
        raise ValueError(argument)
    return value
