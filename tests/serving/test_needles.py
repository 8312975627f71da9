"""A ladder of corpora: the fact of document i is found, cited and answered alike cold, warm and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_kit import Service, Shared, counted, serving

SYLLABLES = ("ba", "ko", "mi", "ru", "ze", "lo", "ti", "na", "fu", "pe")


def name(number: int) -> str:
    """A name that no text and no other number has."""
    return ("Q" + "".join(SYLLABLES[int(digit)] for digit in f"{number * 379 % 1000:03d}")).capitalize()


def fact(number: int) -> str:
    return f"The code word of the lighthouse {name(number)} is {name(number + 500)}."


def document(number: int) -> str:
    return f"{fact(number)} Its keeper climbs {90 + number} steps each evening and writes the weather into a book."


def ask(service: Service, number: int) -> Any:
    answer = service.chat("needles", f"What is the code word of the lighthouse {name(number)}?", max_tokens=12)
    assert counted(answer)["not_reused"] == []
    assert counted(answer)["tokens_reused"] > 0
    first = answer.citations[0]
    assert first["filename"] == f"light/{number}.txt"
    assert fact(number) in first["quote"]
    return answer


@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 40))])
def test_each_needle_is_found_cold_warm_and_after_a_restart(tmp_path: Path, embedded: Shared, count: int) -> None:
    asked = sorted({0, count // 2, count - 1})
    with serving(embedded, tmp_path, dtype="float32") as service:
        service.corpus("needles", {f"light/{number}.txt": document(number) for number in range(count)})
        cold = {number: ask(service, number) for number in asked}
        before = service.wiring.kv_store.counters()
        warm = {number: ask(service, number) for number in asked}
        after = service.wiring.kv_store.counters()
    assert after["bytes_read"] == before["bytes_read"], "the second time nothing is read from the store"
    with serving(embedded, tmp_path, dtype="float32") as service:
        restarted = {number: ask(service, number) for number in asked}
        assert service.wiring.kv_store.counters()["bytes_read"] > 0
    for number in asked:
        told = [answers[number].choices[0].message.content for answers in (cold, warm, restarted)]
        assert told[0].strip()
        assert told == [told[0]] * 3
        assert cold[number].citations == warm[number].citations == restarted[number].citations
