"""The signed plan: what the connector believes, and what it refuses without ever raising."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.connector.plan import FIELD, LIFE_S, MAX_SPANS, Plan, Span, Told, cache_salt, plan_secret, sign, token_hash, verify
from storage.types import KVProfile

SECRET = plan_secret(b"a master secret of an installation")
PROMPT = tuple(range(100, 180))
NOW = 1_800_000_000.0
PROFILE = KVProfile("m", "w", "t", "f", "filler:4:x", "raw", "float32", layers=3, kv_heads=2, head_dim=16)


def span(start: int, end: int, **changes: Any) -> Span:
    made = Span(start, end - start, f"{start:064x}", token_hash(PROMPT[start:end]))
    return replace(made, **changes)


PLAN = Plan(
    PROFILE, (span(10, 14, kind="label"), span(14, 40, best=True), span(44, 60, skip=2, codec="int8")), "default", 62, "acme",
    "acme/g", int(NOW) + 60, saves=(span(0, 10),),
)  # fmt: skip


def over_the_wire(params: dict[str, Any]) -> Any:
    return json.loads(json.dumps(params))


def test_what_the_api_signs_the_connector_reads_back_whole() -> None:
    assert verify(over_the_wire(sign(PLAN, SECRET)), SECRET, PROMPT, NOW) == PLAN
    plain = replace(PLAN, plain=True, spans=(), saves=(), thread="first question", tail_start=0)
    assert verify(over_the_wire(sign(plain, SECRET)), SECRET, PROMPT, NOW) == plain


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for name, each in value.items() for leaf in leaves(each, (*path, name))]
    if isinstance(value, list):
        return [leaf for number, each in enumerate(value) for leaf in leaves(each, (*path, number))]
    return [path]


SIGNED: dict[str, Any] = sign(PLAN, SECRET)
FORGED: dict[type, Any] = {
    str: lambda v: v[:-1] + ("e" if v[-1:] == "f" else "f"),
    int: lambda v: v + 1,
    bool: lambda v: not v,
}


@pytest.mark.parametrize("path", leaves(SIGNED), ids=str)
def test_no_field_can_be_changed_after_signing(path: tuple[Any, ...]) -> None:
    forged = copy.deepcopy(SIGNED)
    *way, last = path
    place = forged
    for step in way:
        place = place[step]
    place[last] = FORGED[type(place[last])](place[last])
    assert isinstance(verify(forged, SECRET, PROMPT, NOW), str)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expires": int(NOW) - 1}, "has expired"),
        ({"expires": int(NOW) + LIFE_S + 1}, "valid for too long"),
        ({"spans": (span(14, 40), span(30, 50))}, "overlap"),
        ({"spans": (span(44, 60), span(14, 40))}, "overlap"),
        ({"spans": (span(70, 80), replace(span(0, 1), start=80))}, "overlap, or reach beyond"),
        ({"spans": (replace(span(14, 40), tokens=token_hash([1])),)}, "other tokens"),
        ({"saves": (replace(span(14, 40), tokens=token_hash([1])),)}, "other tokens"),
        ({"tail_start": 59}, "question begins before"),
        ({"tail_start": 81}, "question begins before"),
        ({"spans": (replace(span(14, 40), length=0),)}, "span of the plan is out of bounds"),
        ({"spans": (span(14, 40, kind="turn"),)}, "span of the plan is out of bounds"),
        ({"spans": (span(14, 40, key="../../etc/passwd"),)}, "span of the plan is out of bounds"),
        ({"spans": tuple(span(n, n + 1) for n in range(80)) * (MAX_SPANS // 80 + 1)}, f"more than {MAX_SPANS}"),
        ({"tenant": "x" * 513}, "out of bounds"),
        ({"profile": replace(PROFILE, layers=-1)}, "profile is out of bounds"),
    ],
)
def test_a_signed_plan_that_is_wrong_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    refused = verify(sign(replace(PLAN, **changes), SECRET), SECRET, PROMPT, NOW)
    assert isinstance(refused, str)
    assert reason in refused


def test_a_plan_of_another_prompt_or_installation_or_version_is_refused() -> None:
    assert "other tokens" in str(verify(SIGNED, SECRET, PROMPT[::-1], NOW))
    assert "not signed" in str(verify(SIGNED, plan_secret(b"another installation"), PROMPT, NOW))
    newer = {FIELD: {**SIGNED[FIELD], "version": 2}}
    assert "one release" in str(verify(newer, SECRET, PROMPT, NOW))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(JSON, JSON, st.sampled_from(leaves(SIGNED)), st.integers(0, 3))
def test_hostile_input_never_raises(whole: Any, part: Any, path: tuple[Any, ...], up: int) -> None:
    assert isinstance(verify(whole, SECRET, PROMPT, NOW), str)
    hostile = copy.deepcopy(SIGNED)
    *way, last = path[: max(1, len(path) - up)]
    place: Any = hostile
    for step in way:
        place = place[step]
    if type(place[last]) is type(part) and place[last] == part:
        return
    place[last] = part
    assert isinstance(verify(hostile, SECRET, PROMPT, NOW), str)


@pytest.mark.parametrize("prompt", [(), (-1,) * 80, ("a",) * 80, (None,) * 80])
def test_a_prompt_that_is_no_list_of_ids_is_refused_too(prompt: Any) -> None:
    assert isinstance(verify(SIGNED, SECRET, prompt, NOW), str)


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "group": lambda p: replace(p, group="another"),
    "tenant": lambda p: replace(p, tenant="another"),
    "method": lambda p: replace(p, method="reuse"),
    "key": lambda p: replace(p, spans=(replace(p.spans[0], key="f" * 64), *p.spans[1:])),
    "place": lambda p: replace(p, spans=(replace(p.spans[0], start=9), *p.spans[1:])),
    "fewer": lambda p: replace(p, spans=p.spans[1:]),
    "profile": lambda p: replace(p, profile=replace(PROFILE, weights="another")),
    "thread": lambda p: replace(p, thread="another question"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_salt_differs_wherever_blended_blocks_would(name: str) -> None:
    assert cache_salt(CHANGES[name](PLAN)) != cache_salt(PLAN)


def test_the_turns_of_a_plain_conversation_share_a_salt_whatever_passages_they_add() -> None:
    plain = replace(PLAN, plain=True, thread="who asks, and the first question")
    assert cache_salt(replace(plain, spans=plain.spans[:1], tail_start=50)) == cache_salt(plain)
    for name in ("group", "tenant", "method", "profile", "thread"):
        assert cache_salt(CHANGES[name](plain)) != cache_salt(plain)
    alone = replace(plain, thread="")
    assert cache_salt(replace(alone, spans=alone.spans[:1])) != cache_salt(alone) != cache_salt(plain)


def test_the_salt_is_the_same_for_the_same_content_later() -> None:
    assert cache_salt(replace(PLAN, expires=PLAN.expires + 999)) == cache_salt(PLAN)


def test_what_became_of_a_plan_comes_back_and_nonsense_is_read_as_nothing() -> None:
    told = Told("", 60, 5, 15, {"k": "absent"}, {"l": "memory"}, ["m"], 1.5, 2.5)
    assert Told.read(over_the_wire(told.params())) == told
    for nonsense in (None, 3, {}, {FIELD: 3}, {FIELD: {"reused": "many", "missed": 4, "unknown": 1}}):
        assert Told.read(nonsense) == Told()
