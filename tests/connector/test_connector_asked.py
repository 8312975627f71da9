"""What became of a plan, asked for afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from serving.connector.asked import MOST, Kept, ask, read
from serving.connector.plan import FIELD, Told


def request(signature: str) -> dict[str, Any]:
    return {FIELD: {"signature": signature}}


def test_what_was_told_is_answered_once_to_who_knows_the_signature() -> None:
    kept, told = Kept(), Told(reused=5, missed={"k": "absent"})
    assert kept.finished(request("s"), told.params()) == told.params()
    assert read(kept.finished(ask(request("other")), None)) is None
    assert read(kept.finished(ask(request("s")), None)) == told
    assert read(kept.finished(ask(request("s")), None)) is None


def test_what_is_not_asked_for_is_forgotten_in_the_end() -> None:
    kept = Kept()
    for number in range(MOST + 1):
        kept.finished(request(str(number)), Told(reused=number).params())
    assert read(kept.finished(ask(request("0")), None)) is None
    assert read(kept.finished(ask(request("1")), None)) == Told(reused=1)


@pytest.mark.parametrize(
    "params",
    [None, {}, [], "x", {FIELD: None}, {FIELD: {}}, {FIELD: {"signature": 5}}, {"preread_told": []}, {"preread_told": None}],
)
def test_nonsense_from_a_client_is_no_trouble(params: Any) -> None:
    kept = Kept()
    told = Told(reused=1).params()
    assert read(kept.finished(params, told)) is None
    assert not kept._told
    assert read(kept.finished(params, None)) is None
