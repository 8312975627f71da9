"""The rules as SQL let through exactly what the rules in Python let through, on both databases."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_library import Library
from sqlalchemy import select, text, update

from retrieval.filters import check
from retrieval.rules import Rules
from storage.catalogue.schema import Document

KEYS = st.sampled_from(["a", "b", 'q"uo.te', "$.x", "ключ", ""])
NAMES = st.sampled_from(["ann", "bob", "group:hr", "a'b", '"', "100%", "名"])
# PostgreSQL keeps no NUL in JSON; the API's validation is before us.
TEXTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=3) | NAMES
NUMBERS = st.integers(-5, 5) | st.sampled_from([0.5, -0.25, 2020.0, 1e12, 0.1 + 0.2])
VALUES = TEXTS | NUMBERS | st.booleans()
COMPARISONS = st.builds(
    lambda kind, key, value: {"type": kind, "key": key, "value": value},
    st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte"]), KEYS, VALUES,
) | st.builds(
    lambda kind, key, values: {"type": kind, "key": key, "value": values},
    st.sampled_from(["in", "nin"]), KEYS, st.lists(VALUES, max_size=3),
)  # fmt: skip
FILTERS = st.none() | st.recursive(
    COMPARISONS,
    lambda inner: st.builds(
        lambda kind, filters: {"type": kind, "filters": filters},
        st.sampled_from(["and", "or"]), st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)  # fmt: skip
ACCESS = st.none() | st.lists(NAMES, max_size=3)
DOCUMENTS = st.lists(st.tuples(ACCESS, st.dictionaries(KEYS, VALUES, max_size=4)), min_size=6, max_size=6)


def passed(session: Any, rules: Rules, dialect: str) -> set[str]:
    condition, values = rules.clause(dialect)
    return set(session.scalars(text(f"SELECT d.id FROM document d WHERE {condition}"), values))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=DOCUMENTS, filters=FILTERS, principals=st.frozensets(NAMES, max_size=3))
def test_sql_and_python_agree(library: Library, documents: list, filters: Any, principals: frozenset[str]) -> None:
    check(filters)
    with library.catalogue.read() as session:
        held = set(session.scalars(select(Document.path)))
    if not held:
        library.corpus("vs_2")
        library.corpus("vs_other", "t2")
        for number in range(6):
            library.put(("vs_1", "vs_1", "vs_1", "vs_1", "vs_2", "vs_other")[number], str(number), "text")
    rules = Rules("t1", ("vs_1", "vs_other"), principals, filters)
    with library.catalogue.write() as session:
        for number, (access, attributes) in enumerate(documents):
            change = update(Document).where(Document.path == str(number))
            session.execute(change.values(access=access, attributes=attributes))
        rows = session.scalars(select(Document).execution_options(populate_existing=True)).all()
        expected = {document.id for document in rows if rules.permits(document)}
        assert passed(session, rules, library.catalogue.dialect) == expected


def test_a_filter_that_lets_few_through_finds_them_in_a_large_corpus(library: Library) -> None:
    """Also where they are far down both rankings, behind all that is looked at one by one."""
    texts = [f"alpha beta w{number}" for number in range(700)]
    for number in range(10):
        library.put("vs_1", f"many{number}", *texts, team="blue")
    few = ["rare", *(f"few{number}" for number in range(3))]
    for name in few:
        library.put("vs_1", name, f"alpha {name} in another place and in other words altogether", team="red")
    library.put("vs_1", "closed", "alpha rare", team="red", access=["ann"])
    red = {"type": "eq", "key": "team", "value": "red"}
    for mode in ("dense", "lexical", "hybrid"):
        assert sorted(library.find("alpha beta w7", filters=red, mode=mode)) == sorted(few), mode
        assert "closed" in library.find("alpha beta w7", filters=red, mode=mode, principals=["ann"])
