"""Two tensor-parallel ranks: each has its own heads of every object, and both blend the same tokens in the same step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_connector_saving import eventually
from vllm_kit import VLLM, Installation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def ranks(installation: Installation) -> Iterator[VLLM]:
    engine = VLLM(installation.reader.folder, installation.data, tensor_parallel_size=2, distributed_executor_backend="mp")
    yield engine
    engine.close()


@pytest.mark.parametrize("method", ["reuse", "default", "cacheblend:0.2", "question:1"])
def test_two_ranks_answer_as_one(ranks: VLLM, installation: Installation, method: str) -> None:
    prompt = installation.prompt(f"How many ranks are there by {method}?")
    plain, blended = ranks.run(installation.request(prompt), installation.request(prompt, installation.plan(prompt, method)))
    assert blended.told.refused == ""
    assert blended.tokens == installation.torch_tokens(prompt, method, 8)
    assert plain.tokens == installation.torch_tokens(prompt, "full", 8)


def test_a_missing_chunk_is_computed_by_both_ranks(ranks: VLLM, installation: Installation) -> None:
    [gone] = installation.stored(1, seed=31)
    installation.path(gone).unlink()
    prompt = installation.prompt("What is lacking?", (installation.chunks[0], gone, installation.chunks[1]))
    [answer] = ranks.run(installation.request(prompt, installation.plan(prompt, "default")))
    assert answer.told.missed == {gone.kv_key: "absent"}
    assert answer.tokens == installation.torch_tokens(prompt, "default", 8, lacking=[1])


def test_both_ranks_heads_are_stored_as_one_object(ranks: VLLM, installation: Installation) -> None:
    chunk, key = tuple(range(30, 90)), "a" * 64
    ranks.run(installation.saving(chunk, key))
    [expected] = installation.reader.compile([chunk])
    assert torch.allclose(eventually(installation, key).kv, expected, atol=1e-4)
