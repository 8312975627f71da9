"""A corpus's standing rules of who may see which documents: the admin's word, before what an upload says for itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


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


class _each_name(FunctionElement[Any]):
    """The names of a list, one a row."""

    name = "each_name"
    inherit_cache = True


@compiles(_each_name)
def _in_sqlite(element: _each_name, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_each({compiler.process(element.clauses, **options)})"


@compiles(_each_name, "postgresql")
def _in_postgresql(element: _each_name, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_array_elements_text({compiler.process(element.clauses, **options)})"


def is_open_to(column: Any, names: Collection[str]) -> ColumnElement[bool]:
    """The same as `is_open`, of a column of lists. Names are compared whole: no text of a list is searched, as a name may
    hold whatever JSON has between two names."""
    each = _each_name(column).table_valued("value")
    named = select(1).select_from(each).where(each.c.value.in_(sorted(names)))
    return or_(column.is_(None), named.exists())
