"""A corpus's standing rules of who may see which documents: the admin's word, before what an upload says for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any


def ruled(settings: Mapping[str, Any], path: str, given: Sequence[str] | None) -> list[str] | None:
    """The access list of the document at `path`: that of the last rule whose pattern fits, else `given`. None: everyone
    in the tenant."""
    for rule in reversed(settings.get("access", ())):
        if fnmatchcase(path, rule["path"]):
            principals: list[str] | None = rule["principals"]
            return principals
    return None if given is None else list(given)
