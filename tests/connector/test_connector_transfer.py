"""vLLM's pages as tensors: found by writing and reading back, filled and copied, a rank's heads at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precompute.rope import Rope
from serving.connector.obstacles import check_start, obstacle, rope_obstacle
from serving.connector.transfer import LAYOUTS, Heads, Pages, find_layout
from storage.errors import UserError

LAYERS, BLOCKS, BLOCK, DIM = 2, 9, 16, 8
TABLE = torch.tensor([5, 1, 7])


class Rotary:
    attention_scaling = 1.0

    def __call__(self, _probe: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None] * 10.0 ** -torch.arange(DIM // 2)
        return torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)


class Layer:
    """Pages of one layout, written token by token as a kernel would."""

    def __init__(self, layout: Any, heads: int, strided: bool = False) -> None:
        whole = torch.full((BLOCKS, BLOCK, heads, 2 * DIM), 3.0).transpose(1, 2)
        self.pages = whole if strided else whole.contiguous()
        self._layout = layout

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        for view, given in zip(self._layout(self.pages), (k, v), strict=True):
            for token, slot in zip(given, slots.tolist(), strict=True):
                view[slot // BLOCK, :, slot % BLOCK] = token


def pages(layout: Any, rank: int = 0, ranks: int = 1) -> Pages:
    heads, rope = Heads.of(rank, ranks, 4), Rope(Rotary(), 64, torch.device("cpu"))
    return Pages([Layer(layout, heads.count) for _ in range(LAYERS)], layout, rope, heads, BLOCK)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_is_found_by_what_the_backend_writes(layout: Any) -> None:
    layer = Layer(layout, 2)
    assert find_layout(layer, BLOCK) is layout
    assert not layer.pages[1:3].any()
    assert bool((layer.pages[3:] == 3.0).all())


def test_pages_with_strides_of_their_own_are_token_major_or_nothing() -> None:
    assert find_layout(Layer(LAYOUTS[0], 2, strided=True), BLOCK) is LAYOUTS[0]


def test_a_backend_that_stores_something_else_has_no_layout() -> None:
    layer = Layer(LAYOUTS[0], 2)
    write = layer.write
    layer.write = lambda k, v, slots: write(k.flip(-1), v, slots)  # type: ignore[method-assign]
    assert find_layout(layer, BLOCK) is None
    assert find_layout(Layer(LAYOUTS[0], 2), 2 * BLOCK) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_placed_is_there_turned_to_its_position(layout: Any) -> None:
    made = pages(layout)
    kv = torch.randn(LAYERS, 2, 4, 20, DIM)
    made.place([(kv[:, :, :, 8:], 22), (kv[:, :, :, :8], 14)], TABLE)
    positions = torch.arange(14, 34)
    there = made.take(positions, TABLE)
    assert torch.equal(there[:, 1], kv[:, 1])
    assert torch.allclose(made.rope.unplace(there[:, 0], positions), kv[:, 0], atol=1e-5)
    assert torch.allclose(there[:, 0], made.rope.place(kv[:, 0], positions))
    assert torch.equal(made.keys(1, 34, TABLE)[:, 14:], there[1, 0])
    assert torch.equal(made.values(1, positions, TABLE), there[1, 1].transpose(0, 1))
    used = {int(slot) for slot in made.slots(positions, TABLE)}
    assert used == {*range(5 * BLOCK + 14, 6 * BLOCK), *range(BLOCK, 2 * BLOCK), *range(7 * BLOCK, 7 * BLOCK + 2)}


@pytest.mark.parametrize(("ranks", "shares"), [(1, [(0, 4)]), (2, [(0, 2), (2, 2)]), (8, [(n // 2, 1) for n in range(8)])])
def test_each_rank_takes_its_own_heads(ranks: int, shares: list[tuple[int, int]]) -> None:
    assert [(h.first, h.count) for h in (Heads.of(rank, ranks, 4) for rank in range(ranks))] == shares
    kv = torch.randn(LAYERS, 2, 4, 5, DIM)
    for rank, (first, count) in enumerate(shares):
        made = pages(LAYOUTS[1], rank, ranks)
        made.place([(kv, 0)], TABLE)
        assert torch.equal(made.take(torch.arange(5), TABLE)[:, 1], kv[:, 1, first : first + count])


# --- what is not blended --------------------------------------------------------------------------------------------------


def config(**changes: Any) -> Any:
    made: dict[str, Any] = {
        "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "use_mla": False,
        "cache_dtype": "auto", "dtype": torch.bfloat16, "uses_mrope": False, "is_multimodal_model": False, "draft": None,
    } | changes  # fmt: skip
    every = SimpleNamespace(**made)
    return SimpleNamespace(parallel_config=every, model_config=every, cache_config=every, speculative_config=every.draft)


def cache(*kinds: str, **fields: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=type(kind, (), fields)()) for kind in kinds]
    return SimpleNamespace(kv_cache_groups=groups)


FULL = cache("FullAttentionSpec")


@pytest.mark.parametrize(
    ("changes", "pages", "word"),
    [
        ({}, FULL, ""),
        ({"cache_dtype": "bfloat16"}, FULL, ""),
        ({"pipeline_parallel_size": 2}, FULL, "pipeline"),
        ({"decode_context_parallel_size": 2}, FULL, "context parallelism"),
        ({"use_mla": True}, FULL, "MLA"),
        ({"cache_dtype": "fp8"}, FULL, "fp8"),
        ({"uses_mrope": True}, FULL, "positions"),
        ({"draft": object()}, FULL, "draft"),
        ({}, cache("SlidingWindowSpec"), "window"),
        ({}, cache("FullAttentionSpec", "SlidingWindowSpec"), "window"),
        ({}, cache("FullAttentionSpec", sliding_window=4096), "sliding window"),
    ],
)
def test_what_cannot_be_blended_is_computed_in_full_with_the_reason(changes: dict[str, Any], pages: Any, word: str) -> None:
    reason = obstacle(config(**changes), pages)
    assert word in reason
    assert bool(reason) == bool(word)
    assert not reason or reason.endswith("prompts are computed in full.")


def test_another_vllm_or_one_that_fails_on_a_lost_load_is_not_started() -> None:
    check_start("0.32.0", "recompute")
    with pytest.raises(UserError, match=r"made for vLLM 0\.32\.x, and this is vLLM 0\.31\.2"):
        check_start("0.31.2", "recompute")
    with pytest.raises(UserError, match="kv_load_failure_policy"):
        check_start("0.32.1", "fail")


def rotary(name: str, neox: bool = True) -> Any:
    return type(name, (), {"is_neox_style": neox})()


def test_only_one_rotation_by_position_alone_is_turned() -> None:
    assert rope_obstacle([rotary("Llama3RotaryEmbedding")]) == ""
    assert "DynamicNTK" in rope_obstacle([rotary("DynamicNTKScalingRotaryEmbedding")])
    assert "RotaryEmbedding" in rope_obstacle([rotary("RotaryEmbedding", neox=False)])
    assert "2 rotations" in rope_obstacle([rotary("RotaryEmbedding")] * 2)
