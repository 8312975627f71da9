"""Object names: `/`-separated ASCII words that are safe as a path and as an S3 key alike."""

from __future__ import annotations

import re

MAX_NAME = 800  # S3 allows 1024, our prefix in the bucket included
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,198}"  # no leading dot, so no `..` and no hidden file
_NAME = re.compile(f"{_SEGMENT}(/{_SEGMENT})*")


def is_name(name: str) -> bool:
    """Whether an object may have this name."""
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """The name itself. Raises ValueError if no object may have it: names are ours, never a user's."""
    if not is_name(name):
        raise ValueError(f"not an object name: {name[:80]!r}")
    return name


def check_prefix(prefix: str) -> str:
    """The prefix itself: empty, or the beginning of a name. Raises ValueError otherwise."""
    if prefix and not is_name(prefix.removesuffix("/")):
        raise ValueError(f"not the beginning of an object name: {prefix[:80]!r}")
    return prefix
