"""Packed linear layers: the same bits, or the plain layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from retrieval.embedder import SentenceEmbedder, find_model
from retrieval.packed_linear import PackedLinear, pack

TEXTS = ["Who pays for the train?", "a", "Parental leave lasts twenty weeks. " * 12, *(f"word {n} and others" for n in range(9))]


def packed(model: nn.Module) -> list[bool]:
    layers = [each for each in model.modules() if isinstance(each, nn.Linear | PackedLinear)]
    return [isinstance(each, PackedLinear) for each in layers]


def test_vectors_are_to_the_bit_those_of_the_plain_layers() -> None:
    from sentence_transformers import SentenceTransformer

    embedder = SentenceEmbedder(dtype="bfloat16")
    together = np.array([*embedder.embed(TEXTS), *(embedder.embed([text])[0] for text in TEXTS)])
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert all(packed(embedder._model))
    embedder._loaded = SentenceTransformer(
        str(find_model("embedded")), device="cpu", local_files_only=True, model_kwargs={"dtype": "bfloat16"}
    ).eval()
    assert packed(embedder._model) == [False] * 37
    plain = np.array([*embedder.embed(TEXTS), *(embedder.embed([text])[0] for text in TEXTS)])
    assert np.array_equal(together, plain)


def test_other_types_are_left_alone() -> None:
    embedder = SentenceEmbedder()
    embedder.embed(["a"])
    assert not any(packed(embedder._model))


class Curious(nn.Module):
    """Asks for a layer's weights, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, dtype=torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.first(inputs.to(self.first.weight.dtype))
        return found


@pytest.mark.parametrize("other", [False, True])
def test_a_model_that_fails_or_computes_something_else_keeps_its_layers(other: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16)) if other else Curious()
    inputs, computed = torch.randn(3, 32, dtype=torch.bfloat16), 0

    def compute() -> Tensor:
        nonlocal computed
        computed += 1
        found: Tensor = model(inputs)
        return found + computed if other else found

    before = model(inputs)
    pack(model, compute)
    assert computed == 2
    assert packed(model) == [False]
    assert torch.equal(model(inputs), before)
