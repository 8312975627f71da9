"""Whose turn it is: first tokens in the order of arrival, short prompts a little sooner, answers go on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_kit import EngineSite, chunk

from precompute.reader import PIECE
from serving.engine.turns import PATIENCE, Running, Turns
from serving.engine.types import Report


@dataclass
class Asked:
    """A request that needs `pieces` turns to its first token."""

    name: str
    pieces: int
    report: Report = field(default_factory=Report)

    def turn(self) -> None:
        self.pieces -= 1
        if self.pieces == 0:
            self.report.ms["first_token"] = 1.0


def running(name: str, pieces: int) -> Any:
    return Running(Asked(name, pieces), iter(()), pieces * PIECE)  # type: ignore[arg-type]


def order(turns: Turns, rounds: int) -> list[str]:
    """The names in the order of their turns."""
    seen = []
    for _ in range(rounds):
        for request in turns.round():
            request.generation.turn()  # type: ignore[attr-defined]
            seen.append(request.generation.name)  # type: ignore[attr-defined]
    return seen


def test_equal_prompts_get_their_first_tokens_one_after_another() -> None:
    turns = Turns()
    for name in "abc":
        turns.add(running(name, 2))
    assert order(turns, 6) == ["a", "a", "a", "b", "a", "b", "a", "b", "c", "a", "b", "c"]


def test_a_short_prompt_goes_before_a_long_one() -> None:
    turns = Turns()
    turns.add(running("long", 40))
    assert order(turns, 2) == ["long", "long"]
    turns.add(running("short", 1))
    assert order(turns, 2) == ["short", "short", "long"]


def test_a_long_prompt_is_not_overtaken_for_ever() -> None:
    turns, long = Turns(), running("long", 20)
    turns.add(long)
    before_long = 0
    for number in range(100):
        turns.add(running(f"short {number}", 2))
        prefilling = [r for r in turns.round() if not r.answers]
        for request in prefilling:
            request.generation.turn()
            before_long += request is not long
        if long.answers:
            break
    assert long.answers
    assert before_long == 20 * PATIENCE


def test_chats_at_once_get_first_tokens_no_later_than_one_by_one(engine_site: EngineSite) -> None:
    """Counted in work, not in time: forward passes until each first token, together and one after the other."""
    passes, lock, forward = [0], threading.Lock(), type(engine_site.reader).forward

    def counting(*arguments: Any, **named: Any) -> Any:
        with lock:
            passes[0] += 1
        return forward(*arguments, **named)

    # Not stored: several pieces of prefill each.
    long = tuple(chunk(10 + n, tuple(range(10, 410))) for n in range(4))

    async def first_tokens(together: bool) -> list[int]:
        start = passes[0]
        requests = [engine_site.request(f"Question {n}?", method="default", max_tokens=8, chunks=long) for n in range(6)]

        async def one(generation: Any) -> int:
            first = 0
            async for _ in generation:
                first = first or passes[0] - start
            return first

        if together:
            generations = [engine_site.engine.submit(request) for request in requests]
            return await asyncio.gather(*(one(g) for g in generations))
        return [await one(engine_site.engine.submit(request)) for request in requests]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine_site.reader), "forward", counting)
        alone = asyncio.run(first_tokens(together=False))
        at_once = asyncio.run(first_tokens(together=True))
    # A pass may end between a first token and the moment the event loop sees it.
    assert all(a <= b + 2 for a, b in zip(at_once, alone, strict=True)), (at_once, alone)
    assert at_once[0] < alone[1] <= at_once[-1] < alone[-1], "answers go on while others read their prompts"
