"""A corpus's standing rules of who may see which documents: the admin's word, before what an upload says for itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


def is_open(access: Sequence[str] | None, names: Collection[str] | None) -> bool:
    """Whether a document with this list is open to who has these names. `names` None: the service itself."""
    return names is None or access is None or any(name in access for name in names)
