"""The canary measures how far served answers are from full prefill, after they were served."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from api_kit import Site
from engine_kit import EngineSite
from fixtures_models import Models

from serving.engine.types import Emphasis


def canaries(site: EngineSite, count: int) -> float:
    """Wait for `count` comparisons; the mean KL."""
    until = time.monotonic() + 20
    while site.engine.canary_totals()[0] < count:
        assert time.monotonic() < until, "the canary did not compare"
        time.sleep(0.01)
    answers, kl = site.engine.canary_totals()
    return kl / answers


@pytest.fixture
def watched(tiny_models: Models, tmp_path: Path) -> Callable[[float], EngineSite]:
    made: list[EngineSite] = []

    def make(share: float) -> EngineSite:
        made.append(EngineSite(tiny_models.reader("llama"), tmp_path / f"kv{len(made)}", canary_share=share))
        return made[-1]

    yield make
    for site in made:
        site.engine.close()


def test_every_answer_is_compared_if_the_share_is_one(watched: Callable[[float], EngineSite]) -> None:
    site = watched(1.0)
    site.answer()
    reuse = canaries(site, 1)
    assert reuse > 1e-4
    exact = watched(1.0)
    exact.answer(method="question:1.0")
    assert canaries(exact, 1) < 1e-6 < reuse


def test_none_is_compared_if_the_share_is_nought(watched: Callable[[float], EngineSite]) -> None:
    site = watched(0.0)
    site.answer()
    time.sleep(0.3)  # as long as comparing takes an idle engine several times over
    assert site.engine.canary_totals() == (0, 0.0)


def test_full_prefill_and_steered_answers_are_not_compared(watched: Callable[[float], EngineSite]) -> None:
    site = watched(1.0)
    chunk = site.chunks[0]
    site.answer(method="full")
    site.answer(emphasis={chunk.chunk_id: (Emphasis(chunk.start, chunk.end, 3.0),)})
    site.answer()
    canaries(site, 1)
    time.sleep(0.2)
    assert site.engine.canary_totals()[0] == 1


def test_its_figures_and_the_gates_verdict_are_metrics(site: Site) -> None:
    site.engine.full_prefill_reason = "K without position differs"
    with site.http() as http:
        text = http.get("/metrics").text
        ready = http.get("/readyz").json()
    assert "preread_canary_answers_total 0.0" in text
    assert "preread_canary_kl_total 0.0" in text
    assert 'preread_full_prefill_only{reason="K without position differs"} 1.0' in text
    assert ready["model"] == {"id": "echo-1", "full_prefill_reason": "K without position differs"}
