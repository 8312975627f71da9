"""Many random mixes of what may happen, over few pages: every request ends right, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from vllm_kit import VLLM, Installation

from storage.types import RetrievedChunk

MIXES, SEED = 200, 7
BLOCKS = 34  # few enough that requests are preempted
# What vLLM still has of an earlier prompt shows in the answer of "reuse" (the rest of a block is computed), not of the other.
METHODS = ("reuse", "question:1")
TOKENS = 70
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def narrow(installation: Installation) -> Iterator[VLLM]:
    engine = VLLM(installation.reader.folder, installation.data, num_gpu_blocks_override=BLOCKS, max_model_len=1024)
    yield engine
    engine.close()


class Mixes:
    """Requests of random kinds, each with the tokens that it must be answered with."""

    def __init__(self, installation: Installation, seed: int) -> None:
        self._installation, self._luck = installation, random.Random(seed)
        absent, damaged = installation.stored(2, seed=seed)
        installation.path(absent).unlink()
        path = installation.path(damaged)
        path.write_bytes(path.read_bytes()[:-30])
        self._spoilt: tuple[RetrievedChunk, ...] = (absent, damaged)

        @cache
        def expected(question: int, method: str, spoilt: int | None) -> list[int]:
            prompt, lacking = self._prompt(question, spoilt)
            return installation.torch_tokens(prompt, method, TOKENS, lacking=lacking)

        self._expected = expected

    def _prompt(self, question: int, spoilt: int | None) -> tuple[Any, list[int]]:
        chunks = list(self._installation.chunks[question % 3 : 3 + question % 3])
        if spoilt is not None:
            chunks[1] = self._spoilt[spoilt]
        return self._installation.prompt(f"Question number {question}?", chunks), [1] if spoilt is not None else []

    def one(self) -> tuple[dict[str, Any], list[int] | None]:
        """A request and its answer; None for any answer."""
        luck = self._luck
        kind = luck.choice(["plain", "blended", "blended", "spoilt", "forged", "nonsense"])
        question, method = luck.randrange(4), luck.choice(METHODS)
        spoilt = luck.randrange(2) if kind == "spoilt" else None
        prompt, _ = self._prompt(question, spoilt)
        plan = None if kind == "plain" else self._installation.plan(prompt, method)
        request = self._installation.request(prompt, plan, at=luck.randrange(12), max_tokens=TOKENS, logprobs=None)
        if kind in ("forged", "nonsense"):
            request["salt"] = None
        if kind == "forged":
            request["params"]["preread"]["expires"] += 1
        if kind == "nonsense":
            request["params"] = luck.choice([{"preread": None}, {"preread": {"spans": "zzz"}}, {"preread": [[]]}, {"x": 1}])
        if luck.random() < 0.25:
            request["abort"] = request["at"] + luck.randrange(12)
        blended = kind in ("blended", "spoilt")
        return request, None if blended and method == "reuse" else self._expected(question, "full", spoilt)


def test_whatever_comes_every_request_ends_right_and_nothing_is_left(narrow: VLLM, installation: Installation) -> None:
    mixes = Mixes(installation, SEED)
    luck = random.Random(SEED)
    preempted = 0
    for _ in range(MIXES):
        mix = [mixes.one() for _ in range(luck.randrange(1, 6))]
        answers = narrow.run(*(request for request, _ in mix))
        for (request, expected), answer in zip(mix, answers, strict=True):
            if answer.reason != "abort":
                assert len(answer.tokens) == TOKENS
                assert answer.tokens == (expected or answer.tokens), request
                assert not answer.told.refused or request["salt"] is None
        counts = narrow.do("counts")
        preempted = counts["preempted"]
        assert counts["blocks"] == counts["requests"] == 0
        assert set(counts["scheduler"].values()) | set(counts["worker"].values()) == {0}
    assert preempted > 0  # else there were too many pages to show anything
