"""A recorded agent that calls tools, as OpenAI's clients send it: twenty requests through the API of a whole service, which name
no corpus and hold files that are stored. What is reused is held against prefix caching in its strongest form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_kit import Shared, counted, serving

from bench.agent import _shared, _text
from bench.endurance import tiny_model

SAMPLES = Path(__file__).parents[2] / "samples"
TRACE: dict[str, Any] = json.loads((SAMPLES / "agent" / "tools.json").read_text(encoding="utf-8"))
CODE = SAMPLES / "codebase"
MARGIN = 0.1  # of all prompt tokens


def message(said: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI has it."""
    return {name: said[name] for name in ("role", "tool_calls", "tool_call_id") if name in said} | {"content": _text(said, CODE)}


def test_the_recorded_requests_are_whole() -> None:
    """Every result follows its call, as OpenAI's API would have it."""
    roles, used = set(), set()
    for request in TRACE["requests"]:
        called: set[str] = set()
        for said in (TRACE["messages"][name] for name in request["send"]):
            called |= {call["id"] for call in said.get("tool_calls", ())}
            used |= {call["function"]["name"] for call in said.get("tool_calls", ())}
            assert said["role"] != "tool" or said["tool_call_id"] in called
            roles.add(said["role"])
    assert len(TRACE["requests"]) == 20
    assert roles == {"system", "user", "assistant", "tool"}
    assert used == {tool["function"]["name"] for tool in TRACE["tools"]} - {"finish"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_agent_that_calls_tools_reuses_more_than_a_prefix_cache_would(
    tmp_path: Path, embedded_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert embedded_folder.is_dir(), "what the tiny model has its tokenizer from"
    rows, prompts = [], list[np.ndarray]()
    with serving(Shared(tiny_model(tmp_path)), tmp_path / "data", dtype="float32", blended_cache_bytes=256 << 20) as service:
        service.corpus("code", {str(path.relative_to(CODE)): path.read_text() for path in CODE.rglob("*") if path.is_file()})
        prepare = service.wiring.engine.prepare

        def prepared(request: Any) -> Any:
            made = prepare(request)
            prompts.append(np.array(made.plan.tail))
            return made

        monkeypatch.setattr(service.wiring.engine, "prepare", prepared)
        for request in TRACE["requests"]:
            offered = {"tools": TRACE["tools"]} if "tools" in request else {}
            said: list[Any] = [message(TRACE["messages"][name]) for name in request["send"]]
            answer = service.client.chat.completions.create(model=service.model, messages=said, max_tokens=2, **offered)
            report, [*earlier, ids] = counted(answer), prompts
            assert answer.usage.prompt_tokens == len(ids)
            rows.append((len(ids), report["tokens_reused"], max((_shared(ids, each) for each in earlier), default=0)))
            print(request["note"], rows[-1], report["tokens_prefix"], report["tokens_moved"])  # noqa: T201
    prompt, reused, prefix = (sum(column) for column in zip(*rows, strict=True))
    print(f"{prompt} prompt tokens, {reused / prompt:.1%} reused, {prefix / prompt:.1%} by a prefix cache")  # noqa: T201
    assert reused > prefix + MARGIN * prompt
    assert prefix > 0.3 * prompt, "a fair comparison: most requests go on from the one before"
