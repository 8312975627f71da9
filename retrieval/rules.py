"""Who may see a document, and whether a filter lets it through, as SQL: so that a search need not list documents.

`Rules.permits` says the same of one row in Python. It has the last word on every result; the two are tested
against each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Row
from sqlalchemy.orm import Session

from retrieval import filters as attribute_filters
from retrieval.sql import run
from storage.catalogue.schema import Document

COMPARISONS = {"eq": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
NEGATED = {"ne": "eq", "nin": "in"}
IDS = "group_concat(c.id)"  # one text instead of a row for each chunk: most of the time would go into rows
PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Rules:
    """Of one search. `corpora` are the tenant's own."""

    tenant_id: str
    corpora: tuple[str, ...]
    principals: frozenset[str]
    filters: Mapping[str, Any] | None = None

    def permits(self, document: Document | Row[Any]) -> bool:
        """The one rule of who may see a document, and whether it was asked for."""
        return (
            document.tenant_id == self.tenant_id
            and document.corpus_id in self.corpora
            and (document.access is None or not self.principals.isdisjoint(document.access))
            and attribute_filters.matches(self.filters, document.attributes)
        )

    def needed(self, session: Session) -> bool:
        """False if every document of the corpora passes, so that a search need not look."""
        if self.filters is not None:
            return True
        closed = "SELECT 1 FROM document WHERE corpus_id = :corpus AND access IS NOT NULL LIMIT 1"
        return any(run(session, closed, {"corpus": corpus}).scalar() for corpus in self.corpora)

    def clause(self, dialect: str) -> tuple[str, dict[str, Any]]:
        """A condition on the row `d` of `document`, with its values."""
        maker = _SQLite() if dialect == "sqlite" else _Postgres()
        parts = [f"d.tenant_id = {maker.value(self.tenant_id)}", maker.one_of("d.corpus_id", self.corpora)]
        parts.append(f"(d.access IS NULL OR {maker.access(sorted(self.principals))})")
        if self.filters is not None:
            parts.append(maker.filter(self.filters))
        return " AND ".join(parts), maker.values

    def among(self, session: Session, chunk_ids: Sequence[int]) -> NDArray[np.int64]:
        """Those of the chunks that pass. For SQLite."""
        one_by_one = "json_each(:ids) AS one CROSS JOIN chunk c ON c.id = one.value CROSS JOIN document d ON d.id = c.document_id"
        return self._listed(session, one_by_one, ids=json.dumps(list(chunk_ids)))

    def all(self, session: Session) -> NDArray[np.int64]:
        """All chunks that pass, looked up once in a session. For SQLite."""
        held: tuple[Rules | None, NDArray[np.int64]] = session.info.get("passing", (None, ids_of(None)))
        of, ids = held
        if of is not self:
            ids = self._all(session)
            session.info["passing"] = (self, ids)
        return ids

    def _all(self, session: Session) -> NDArray[np.int64]:
        return self._listed(session, "document d CROSS JOIN chunk c ON c.document_id = d.id")

    def _listed(self, session: Session, tables: str, **values: Any) -> NDArray[np.int64]:
        condition, named = self.clause("sqlite")
        return ids_of(run(session, f"SELECT {IDS} FROM {tables} WHERE {condition}", named | values).scalar())

    def passing(self, session: Session) -> tuple[str, dict[str, Any]]:
        """A query of all chunks that pass, with its values. For PostgreSQL."""
        condition, values = self.clause("postgresql")
        return f"SELECT c.id FROM document d JOIN chunk c ON c.document_id = d.id WHERE {condition}", values


class _Maker:
    """Clauses of one dialect. A comparison holds of an attribute of the value's own kind only, as in `filters`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def value(self, value: Any) -> str:
        name = f"r{len(self.values)}"
        self.values[name] = value
        return f":{name}"

    def filter(self, filters: Mapping[str, Any]) -> str:
        kind = filters["type"]
        if kind in attribute_filters.JOIN:
            return "(" + f" {kind.upper()} ".join(self.filter(each) for each in filters["filters"]) + ")"
        if kind in NEGATED:
            return "NOT " + self.filter({**filters, "type": NEGATED[kind]})
        if kind == "in":
            any_of = [self.compare("=", filters["key"], value) for value in filters["value"]]
            return "(" + " OR ".join(any_of or ["1 = 0"]) + ")"
        if kind != "eq" and isinstance(filters["value"], bool):
            return "(1 = 0)"  # truth values have no order
        return self.compare(COMPARISONS[kind], filters["key"], filters["value"])

    def compare(self, operator: str, key: str, value: str | float | bool) -> str:
        raise NotImplementedError


class _SQLite(_Maker):
    def one_of(self, column: str, values: Sequence[str]) -> str:
        return f"{column} IN (SELECT value FROM json_each({self.value(json.dumps(list(values)))}))"

    def access(self, principals: Sequence[str]) -> str:
        held = self.one_of("value", principals)
        return f"EXISTS (SELECT 1 FROM json_each(d.access) WHERE {held})"

    def compare(self, operator: str, key: str, value: str | float | bool) -> str:
        if isinstance(value, bool):
            test = f"{{type}} = '{json.dumps(value)}'"
        elif isinstance(value, str):
            test = f"{{type}} = 'text' AND {{value}} {operator} {self.value(value)}"
        else:
            test = f"{{type}} IN ('integer', 'real') AND {{value}} {operator} {self.value(value)}"
        if PLAIN_KEY.fullmatch(key):  # a path can name it: three times as quick as looking at every key
            path = self.value(f"$.{key}")
            held = {"type": f"json_type(d.attributes, {path})", "value": f"json_extract(d.attributes, {path})"}
            return f"COALESCE({test.format(**held)}, 0)"
        inner = test.format(type="type", value="value")
        return f"EXISTS (SELECT 1 FROM json_each(d.attributes) WHERE key = {self.value(key)} AND {inner})"


def ids_of(found: str | None) -> NDArray[np.int64]:
    """Of `group_concat`."""
    return np.fromstring(found, dtype=np.int64, sep=",") if found else np.empty(0, dtype=np.int64)


class _Postgres(_Maker):
    def one_of(self, column: str, values: Sequence[str]) -> str:
        return f"{column} = ANY({self.value(list(values))})"

    def access(self, principals: Sequence[str]) -> str:
        held = f"ANY(CAST({self.value(list(principals))} AS text[]))"
        return f"EXISTS (SELECT 1 FROM json_array_elements_text(d.access) AS one(name) WHERE name = {held})"

    def compare(self, operator: str, key: str, value: str | float | bool) -> str:
        held = f"d.attributes -> {self.value(key)}"
        if isinstance(value, bool):
            return f"(COALESCE(CAST({held} AS text), '') = '{json.dumps(value)}')"
        kind, cast = ("string", 'text) COLLATE "C"') if isinstance(value, str) else ("number", "numeric)")
        held_value = f"CAST({held.replace('->', '->>')} AS {cast}"
        given = f"CAST({self.value(value if isinstance(value, str) else repr(value))} AS {cast}"
        # CASE, since PostgreSQL may evaluate both sides of an AND.
        return f"(CASE WHEN json_typeof({held}) = '{kind}' THEN {held_value} {operator} {given} ELSE false END)"
