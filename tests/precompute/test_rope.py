"""Placing K equals the model's own rotation, and is undone exactly, for every rope type that is served."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from fixtures_models import MAX_POSITIONS, Models

from precompute.gate import check_model
from precompute.reader import Reader
from precompute.rope import rope_type
from storage.errors import ModelUnsupported

THETA = {"rope_theta": 10000.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
SERVED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", **LLAMA3, **THETA}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", **YARN, **THETA}},
    "partial": {},
}
REFUSED: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **THETA},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        **THETA,
    },
}


@pytest.fixture(params=SERVED)
def reader(request: pytest.FixtureRequest, tiny_models: Models) -> Reader:
    kind = request.param
    family = "phi" if kind == "partial" else "llama"
    return tiny_models.reader(f"rope-{kind}", family=family, **SERVED[kind])


def own_rotation(reader: Reader, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """K [heads, tokens, head_dim] at `positions`, by the functions of the model's own module."""
    rotary = reader.model.base_model.rotary_emb
    module = importlib.import_module(type(reader.model).__module__)
    cos, sin = rotary(k, positions[None])
    width = cos.shape[-1]
    turned, _ = module.apply_rotary_pos_emb(k[None, ..., :width], k[None, ..., :width], cos, sin)
    return torch.cat((turned[0], k[..., width:]), -1)


def random_k(reader: Reader, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(reader.kv_heads, tokens, reader.head_dim, generator=generator)


def test_unplacing_undoes_placing_at_every_position(reader: Reader) -> None:
    k, positions = random_k(reader, MAX_POSITIONS), torch.arange(MAX_POSITIONS)
    back = reader.rope.unplace(reader.rope.place(k, positions), positions)
    assert (back - k).abs().max() <= 1e-5
    again = reader.rope.place(reader.rope.unplace(k, positions), positions)
    assert (again - k).abs().max() <= 1e-5


def test_placing_is_the_models_own_rotation(reader: Reader) -> None:
    k, positions = random_k(reader, MAX_POSITIONS), torch.arange(MAX_POSITIONS)
    assert torch.allclose(reader.rope.place(k, positions), own_rotation(reader, k, positions), atol=1e-5, rtol=0)
    scattered = torch.tensor([0, 3, 700, MAX_POSITIONS - 1])
    few = random_k(reader, 4)
    assert torch.allclose(reader.rope.place(few, scattered), own_rotation(reader, few, scattered), atol=1e-5, rtol=0)


def test_placing_into_a_buffer_leaves_its_other_slots(reader: Reader) -> None:
    k, positions = random_k(reader, 5), torch.arange(40, 45)
    buffer = torch.full((reader.kv_heads, 9, reader.head_dim), torch.nan)
    reader.rope.place(k, positions, out=buffer[:, 2:7])
    assert torch.equal(buffer[:, 2:7], reader.rope.place(k, positions))
    assert buffer[:, :2].isnan().all()
    assert buffer[:, 7:].isnan().all()


def test_the_yarn_factor_is_a_scale_applied_once(tiny_models: Models) -> None:
    reader = tiny_models.reader("rope-yarn", family="llama", **SERVED["yarn"])
    factor = reader.model.base_model.rotary_emb.attention_scaling
    k, positions = random_k(reader, 6), torch.arange(6)
    assert factor > 1.1
    placed = reader.rope.place(k, positions)
    assert torch.allclose(placed.norm(dim=-1), factor * k.norm(dim=-1), rtol=1e-5)


def test_the_rope_kinds_differ(tiny_models: Models) -> None:
    """Guards the tests above: were a scaling ignored, its placement would be the default one."""
    k, at = torch.randn(2, 1, 16), torch.tensor([900])
    placed = [
        tiny_models.reader(f"rope-{kind}", family="llama", **SERVED[kind]).rope.place(k, at)
        for kind in ("default", "linear", "llama3", "yarn")
    ]
    for i, one in enumerate(placed):
        assert all((one - other).abs().max() > 1e-2 for other in placed[i + 1 :])


def test_a_partial_rotation_leaves_the_rest_of_a_head(tiny_models: Models) -> None:
    reader = tiny_models.reader("rope-partial", family="phi")
    k = random_k(reader, 4)
    placed = reader.rope.place(k, torch.arange(500, 504))
    assert torch.equal(placed[..., 8:], k[..., 8:])
    assert (placed[..., :8] - k[..., :8]).abs().max() > 0.1


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_that_depends_on_the_context_is_refused(kind: str, tiny_models: Models) -> None:
    reader = tiny_models.reader(f"rope-{kind}", family="llama", rope_parameters=REFUSED[kind])
    assert reader.full_prefill_reason is not None
    assert kind in reader.full_prefill_reason
    assert not hasattr(reader, "rope")
    with pytest.raises(ModelUnsupported, match=kind):
        rope_type(reader.config)


def test_compiled_k_is_free_of_position(reader: Reader) -> None:
    chunk, nothing = list(range(20, 60)), reader.buffer(0)
    first = reader.compile_behind(nothing, [chunk])[0]
    later = reader.compile_behind(nothing, [chunk], offset=1200)[0]
    assert torch.allclose(first, later, atol=1e-3, rtol=0)


# Rotated in pairs of neighbours; some layers not rotated; attention that our interface does not reach.
MISFITS = ("cohere", "smollm3", "stablelm")


@pytest.mark.parametrize("family", MISFITS)
def test_the_gate_switches_blending_off_where_the_rotation_is_another(family: str, tiny_models: Models) -> None:
    reader = Reader(tiny_models.folder(family), dtype="float32", filler=1)
    assert reader.full_prefill_reason is None
    check_model(reader)
    assert reader.full_prefill_reason is not None


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_lets_the_served_kinds_pass(kind: str, dtype: str, tiny_models: Models) -> None:
    family = "phi" if kind == "partial" else "llama"
    reader = Reader(tiny_models.folder(f"rope-{kind}", family=family, **SERVED[kind]), dtype=dtype, filler=1)
    check_model(reader)
    assert reader.full_prefill_reason is None
