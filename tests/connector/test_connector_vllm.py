"""Our connector inside a real vLLM: what it loads, blends and refuses."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from vllm_kit import BLOCK, VLLM, Answer, Installation, gap

from serving.connector.rank import IDLE_WAIT_S
from storage.types import Miss

EXACT = 1e-4  # of log-probabilities, in fp32
pytestmark = pytest.mark.timeout(1500)  # on a machine that others use too, vLLM takes minutes to start
METHODS = ("default", "question:0.15", "cacheblend:0.2", "epic:8", "reuse")


def both(vllm: VLLM, installation: Installation, question: str, method: str) -> tuple[Answer, Answer]:
    """The plain answer, and the blended one; made at once."""
    prompt = installation.prompt(question)
    plain, blended = vllm.run(installation.request(prompt), installation.request(prompt, installation.plan(prompt, method)))
    told = blended.told
    assert told.refused == ""
    assert told.missed == {}
    assert told.reused + told.recomputed + told.computed == len(installation.request(prompt)["prompt"])
    return plain, blended


# --- blending -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["question:1", "cacheblend:1"])
def test_everything_computed_again_equals_plain_vllm(vllm: VLLM, installation: Installation, method: str) -> None:
    plain, blended = both(vllm, installation, f"How much is a ticket by {method}?", method)
    assert blended.told.recomputed >= sum(len(chunk.token_ids) for chunk in installation.chunks)
    assert blended.tokens == plain.tokens
    assert gap(plain, blended) < EXACT


@pytest.mark.parametrize("method", METHODS)
def test_both_engines_answer_a_plan_alike(vllm: VLLM, installation: Installation, method: str) -> None:
    question = f"Who repairs the ferry by {method}?"
    plain, blended = both(vllm, installation, question, method)
    assert blended.tokens == installation.torch_tokens(installation.prompt(question), method, 8)
    assert (blended.told.recomputed > 0) == (method != "reuse")
    assert blended.told.reused > 100
    assert blended.logprobs != plain.logprobs  # else the blend has not been looked at


def test_prompts_made_at_once_are_answered_as_if_each_were_alone(vllm: VLLM, installation: Installation) -> None:
    prompts = [installation.prompt(f"Question {n}, with more words?", installation.chunks[n % 3 :]) for n in range(6)]
    plans = [installation.plan(prompt, METHODS[n % 5]) if n != 2 else None for n, prompt in enumerate(prompts)]
    requests = [installation.request(p, plan, at=2 * n) for n, (p, plan) in enumerate(zip(prompts, plans, strict=True))]
    together = vllm.run(*requests)
    vllm.do("reset")
    for request, answer in zip(requests, together, strict=True):
        [alone] = vllm.run({**request, "id": request["id"] + "-alone", "at": 0})
        assert alone.tokens == answer.tokens
        assert alone.told.recomputed == answer.told.recomputed
        vllm.do("reset")


def test_a_blend_beside_an_answer_goes_layer_by_layer_and_gives_the_same(vllm: VLLM, installation: Installation) -> None:
    assert vllm.do("broken")["by_layer"]
    prompt, other = installation.prompt("Which harbour is it, beside an answer?"), installation.prompt("Count to a hundred!")
    request = installation.request(prompt, installation.plan(prompt, "question:1"), max_tokens=2)
    [alone] = vllm.run(request)
    vllm.do("reset")
    _, beside = vllm.run(installation.request(other, max_tokens=200), {**request, "id": "beside", "at": 5})
    assert beside.tokens == alone.tokens
    assert gap(beside, alone) < EXACT
    assert beside.step - 5 > alone.step, "in more steps than alone"


# --- the prefix cache ---------------------------------------------------------------------------------------------------


def test_a_plain_prompt_never_reads_blended_pages(vllm: VLLM, installation: Installation) -> None:
    prompt = installation.prompt("What is the season ticket's price?")
    vllm.do("reset")
    [before] = vllm.run(installation.request(prompt))
    vllm.do("reset")
    [blended] = vllm.run(installation.request(prompt, installation.plan(prompt, "reuse")))
    [after] = vllm.run(installation.request(prompt))
    assert gap(before, blended) > 100 * EXACT
    assert gap(before, after) < EXACT
    assert after.cached == 0


def test_a_repeated_plan_finds_its_blended_pages(vllm: VLLM, installation: Installation) -> None:
    prompt = installation.prompt("Where is the northern harbour?")
    plan = installation.plan(prompt, "reuse")
    [first] = vllm.run(installation.request(prompt, plan))
    [again] = vllm.run(installation.request(prompt, replace(plan, expires=plan.expires + 1)))
    [other] = vllm.run(installation.request(prompt, replace(plan, group="acme/another")))
    assert again.cached is not None
    assert again.cached >= len(installation.request(prompt)["prompt"]) // BLOCK * BLOCK - BLOCK
    assert again.told.tiers == {}  # nothing was fetched
    assert again.tokens == first.tokens == other.tokens
    assert other.told.tiers != {}


# --- doubt --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["absent", "damaged"])
def test_a_chunk_that_is_not_there_whole_is_computed(vllm: VLLM, installation: Installation, harm: str) -> None:
    chunks = installation.stored(2, seed=len(harm))
    question = f"How is it, when a chunk is {harm}?"
    prompt = installation.prompt(question, (chunks[0], installation.chunks[2], chunks[1]))
    path = installation.path(chunks[1])
    if harm == "absent":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
    [answer] = vllm.run(installation.request(prompt, installation.plan(prompt, "default")))
    assert answer.told.missed == {chunks[1].kv_key: str(Miss.ABSENT if harm == "absent" else Miss.DAMAGED)}
    assert answer.told.refused == ""
    assert answer.tokens == installation.torch_tokens(prompt, "default", 8, lacking=[2])


def forged(request: dict[str, Any]) -> dict[str, Any]:
    params = request["params"]
    return {**request, "params": {"preread": {**params["preread"], "tail_start": 1}}}


REFUSED: dict[str, tuple[Any, str]] = {
    "no salt": (lambda request: {**request, "salt": None}, "cache_salt"),
    "another salt": (lambda request: {**request, "salt": "blend"}, "cache_salt"),
    "forged": (forged, "not signed"),
    "nonsense": (lambda request: {**request, "params": {"preread": {"op": "load", "spans": "zzz"}}}, "fields"),
    "another prompt": (lambda request: {**request, "prompt": request["prompt"][::-1]}, "other tokens"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_doubtful_plan_is_refused_with_its_reason_and_the_prompt_computed(
    vllm: VLLM, installation: Installation, how: str
) -> None:
    spoil, reason = REFUSED[how]
    prompt = installation.prompt(f"May this be loaded, {how}?")
    request = spoil(installation.request(prompt, installation.plan(prompt, "reuse")))
    plain = {name: value for name, value in request.items() if name != "params"} | {"id": request["id"] + "-plain"}
    refused, expected = vllm.run(request, plain)
    assert reason in refused.told.refused
    assert refused.told.computed == len(request["prompt"])
    assert refused.tokens == expected.tokens
    assert gap(refused, expected) < EXACT


def test_a_plan_of_another_model_or_of_an_unknown_method_is_refused(vllm: VLLM, installation: Installation) -> None:
    prompt = installation.prompt("Whose KV is it?")
    plan = installation.plan(prompt, "reuse")
    wrong = [
        replace(plan, profile=replace(plan.profile, weights="of another model")),
        replace(plan, profile=replace(plan.profile, dtype="bfloat16")),
        replace(plan, method="guess"),
        replace(plan, method="full"),
    ]
    answers = vllm.run(*(installation.request(prompt, each) for each in wrong))
    for answer, word in zip(answers, ("weights", "dtype", "unknown method", "uses no stored KV"), strict=True):
        assert word in answer.told.refused
        assert answer.tokens == answers[0].tokens


def test_others_go_on_while_chunks_are_awaited_and_nobody_polls(vllm: VLLM, installation: Installation) -> None:
    [slow] = installation.stored(1, seed=77)
    prompt = installation.prompt("What takes so long?", (installation.chunks[0], slow))
    vllm.do("stall", seconds=2)
    begun = time.monotonic()
    plain, blended = vllm.run(installation.request(prompt), installation.request(prompt, installation.plan(prompt, "reuse")))
    elapsed = time.monotonic() - begun
    vllm.do("stall", seconds=0)
    assert elapsed > 2
    assert plain.step < blended.step < 60 + elapsed / IDLE_WAIT_S
    assert blended.told.fetch_ms > 2000
    assert blended.tokens == installation.torch_tokens(prompt, "reuse", 8)


# --- what is given up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
def test_a_request_given_up_leaves_nothing_behind(vllm: VLLM, installation: Installation, step: int) -> None:
    prompt = installation.prompt(f"A question that is given up in step {step}?")
    request = installation.request(prompt, installation.plan(prompt, "default"), abort=step, max_tokens=30)
    other = installation.prompt(f"One that goes on meanwhile, {step}?")
    _, answer = vllm.run(request, installation.request(other, installation.plan(other, "reuse")))
    assert answer.tokens == installation.torch_tokens(other, "reuse", 8)
    nothing_left(vllm)


def nothing_left(vllm: VLLM) -> None:
    counts = vllm.do("counts")
    assert counts["blocks"] == counts["requests"] == 0
    assert set(counts["scheduler"].values()) | set(counts["worker"].values()) == {0}
