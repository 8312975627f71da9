"""Passages in an order that comes again: blended for the first conversation, then left to vLLM's own prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fixtures_models import Models
from vllm_server_kit import VLLMServer, VLLMSite, vllm_server, vllm_site

from serving.blend.methods import METHODS, parse_method
from serving.blend.methods import default as default_method
from serving.connector.plan import Plan
from serving.engine.orders import MOST, RECENT_S, Orders
from serving.engine.types import Message


@pytest.fixture
def vllm(tiny_models: Models) -> Iterator[VLLMSite]:
    with vllm_server(tiny_models.reader("llama")) as server, vllm_site(server, tiny_models.folder("llama")) as made:
        yield made


def blended(server: VLLMServer) -> list[bool]:
    return ["kv_transfer_params" in body for body in server.bodies if body["max_tokens"] != 1]


def test_a_second_question_over_the_same_order_goes_in_full_under_a_salt_that_all_later_ones_share(vllm: VLLMSite) -> None:
    for question in ("One?", "Two?", "Three?"):
        outcome, _ = vllm.answer(vllm.request(question))
    assert blended(vllm.server) == [True, False, False]
    assert vllm.server.bodies[1]["cache_salt"] == vllm.server.bodies[2]["cache_salt"] != vllm.server.bodies[0]["cache_salt"]
    assert {each.reason for each in outcome.report.not_reused} == {"prefix"}


def test_a_conversation_goes_on_with_what_was_blended_for_it(vllm: VLLMSite) -> None:
    vllm.answer(vllm.request("One?"))
    vllm.answer(vllm.request("Two?"))
    later = (Message("user", "One?"), Message("assistant", "Yes."), Message("user", "And then?"))
    vllm.answer(vllm.request(messages=later))
    assert blended(vllm.server) == [True, False, True]


def test_another_order_other_corpora_or_another_group_of_keys_are_blended(vllm: VLLMSite) -> None:
    vllm.answer(vllm.request("One?"))
    vllm.answer(vllm.request("Two?", chunks=vllm.chunks[::-1]))
    vllm.answer(vllm.request("Three?", chunks=tuple(replace(each, corpus_id="elsewhere") for each in vllm.chunks)))
    vllm.answer(vllm.request("Four?", chunks=vllm.chunks[:2]))
    assert blended(vllm.server) == [True] * 4


def test_where_the_question_chooses_nothing_all_questions_share_what_is_blended(
    vllm: VLLMSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_method, "WHOLE_UNTIL", -1)
    monkeypatch.setattr(default_method, "NOTHING_FROM", 0)
    for question in ("One?", "Two?"):
        vllm.answer(vllm.request(question))
    assert blended(vllm.server) == [True, True]
    assert vllm.server.bodies[0]["cache_salt"] == vllm.server.bodies[1]["cache_salt"]
    one, two = (plan for plan in vllm.server.plans if isinstance(plan, Plan))
    assert one.spans == two.spans


def test_what_was_long_ago_is_forgotten_and_so_is_what_many_came_after() -> None:
    now = [0.0]
    orders = Orders(lambda: now[0])
    assert [orders.comes_again("o", "a"), orders.comes_again("o", "b")] == [False, True]
    now[0] += RECENT_S + 1
    assert [orders.comes_again("o", "c"), orders.comes_again("o", "a")] == [False, True]
    for number in range(MOST):
        orders.comes_again(f"o{number}", "a")
    assert not orders.comes_again("o", "b")


@pytest.mark.parametrize("name", METHODS)
def test_which_methods_choose_by_the_question(name: str) -> None:
    arguments = {"epic": ":4", "cacheblend": ":0.2", "question": ":0.1"}
    method = parse_method(name + arguments.get(name, ""))
    assert method.by_question(1000) == (name in ("default", "question"))
    assert method.by_question(8000) == (name == "question")
