"""The planner's formulae: exact where a real object or a published model can be asked, consistent elsewhere."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures_models import Models
from hypothesis import given
from hypothesis import strategies as st

from precompute.reader import Reader
from serving.cli_plan import codec_ratio
from serving.plan import (
    PRESETS,
    SPEED_AT,
    Load,
    Shape,
    object_payload,
    plan,
    prefill_flops,
    prefill_seconds,
    read_shape,
    shape_of,
)
from storage.errors import UserError
from storage.folder import FolderStore
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.policy.rules import Rates
from storage.types import KVRecord

RATES = Rates("EUR", gpu_hour=3.6, gb_month={"object": 0.02})
EIGHT = PRESETS["Llama-3.1-8B"]


def test_an_8b_model_has_131072_bytes_of_kv_a_token() -> None:
    assert EIGHT.kv_bytes_per_token == 131_072


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Llama-3.1-8B", 8_030_261_248), ("Qwen2.5-7B", 7_615_616_512), ("Qwen2.5-0.5B", 494_032_768), ("embedded", 134_515_008)],
)
def test_presets_have_the_parameters_that_their_makers_publish(name: str, parameters: int) -> None:
    assert PRESETS[name].parameters == parameters


def test_the_embedded_preset_is_the_embedded_model(embedded_folder: Path) -> None:
    shape = shape_of(str(embedded_folder))
    assert replace(shape, name="embedded") == PRESETS["embedded"]


def test_a_config_and_the_loaded_model_agree(tiny_models: Models) -> None:
    for kind in ("llama", "qwen2"):
        reader = tiny_models.reader(kind)
        shape = shape_of(str(tiny_models.folder(kind)))
        own = (reader.layers, reader.query_heads, reader.kv_heads, reader.head_dim)
        assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == own
        assert shape.parameters == sum(p.numel() for p in set(reader.model.parameters())), kind


@pytest.mark.parametrize("tokens", [1, 7, 64, 400])
def test_a_stored_object_of_the_embedded_model_is_as_large_as_the_formula_says(
    embedded_reader: Reader, tmp_path: Path, tokens: int
) -> None:
    ids = tuple(range(10, 10 + tokens))
    [kv] = embedded_reader.compile([ids])
    key, objects = kv_key(embedded_reader.profile, ids, "g", b"s"), FolderStore(tmp_path)
    written = KVStore(objects).put(KVRecord(key, embedded_reader.profile, ids, kv))
    data = bytearray(written)
    objects.read_into(f"kv/{key[:2]}/{key}", memoryview(data))
    length = struct.unpack_from("<8sII", data)[2]
    header = json.loads(data[16 : 16 + length])
    sections = [header["token_ids"], *header["sections"]]
    shape = shape_of(str(embedded_reader.folder))
    assert sum(size for _, size, _ in sections) == object_payload(shape, tokens)
    assert header["sections"][0][1] * shape.layers == tokens * shape.kv_bytes_per_token
    padding = sum(-size % 64 for _, size, _ in sections)
    assert written - object_payload(shape, tokens) - padding < 4096, "header, checksum and mark"


@pytest.fixture(scope="module")
def embedded_reader(embedded_folder: Path) -> Reader:
    return Reader(embedded_folder)


def test_flops_of_a_matrix_counted_by_hand() -> None:
    shape = Shape("x", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocabulary=10, tied=True)
    # per layer: q 8x8, k 8x4, v 8x4, o 8x8, three of 8x16
    assert shape.block_weights == 2 * (64 + 32 + 32 + 64 + 3 * 128)
    # token 1 sees 1 key, token 2 sees 2, token 3 sees 3: 6 pairs of 2 heads of 4 numbers, K and V, multiply and add
    assert prefill_flops(shape, 3) == 2 * shape.block_weights * 3 + 2 * (6 * 2 * 4 * 2 * 2) + 2 * 10 * 8


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_reading_in_two_goes_costs_what_reading_at_once_does(first: int, second: int) -> None:
    last = 2 * EIGHT.vocabulary * EIGHT.hidden
    together = prefill_flops(EIGHT, first + second)
    assert prefill_flops(EIGHT, first) + prefill_flops(EIGHT, second, behind=first) - last == pytest.approx(together)


def test_time_goes_with_flops_from_where_it_was_measured() -> None:
    assert prefill_seconds(EIGHT, SPEED_AT, 20_000) == SPEED_AT / 20_000
    ratio = prefill_flops(EIGHT, 8192) / prefill_flops(EIGHT, 2048)
    assert prefill_seconds(EIGHT, 8192, 1.0) / prefill_seconds(EIGHT, 2048, 1.0) == pytest.approx(ratio)
    assert ratio > 4, "attention grows faster than the prompt"


def test_the_plan_on_paper() -> None:
    """10 million chunks of 400 tokens at a quarter of bf16 are 131 TB, and one GPU reads them in 55 hours."""
    told = plan(EIGHT, Load(tokens=4_000_000_000, queries_per_day=0, codec_ratio=0.25), RATES)
    assert told["stored_bytes"] == pytest.approx(131e12, rel=0.01)
    assert told["compile_seconds"] / 3600 == pytest.approx(55, rel=0.03)


def test_bandwidth_decides_whether_loading_is_quicker() -> None:
    load = Load(tokens=1_000_000, queries_per_day=100, recomputed=0.1)
    told = plan(EIGHT, load, RATES)
    even = plan(EIGHT, replace(load, bandwidth=told["bandwidth_to_break_even"]), RATES)
    assert even["load_seconds"] == pytest.approx(even["prefill_seconds_saved"])
    assert told["prefill_seconds_saved"] == pytest.approx(0.9 * told["prefill_seconds"])
    assert told["mean_bandwidth"] == pytest.approx(100 * told["bytes_per_query"] / 86400)


def test_at_break_even_storing_costs_what_it_saves() -> None:
    load = Load(tokens=1_000_000, queries_per_day=1.0, tokens_per_s=20_000)
    told = plan(EIGHT, load, RATES)
    even = plan(EIGHT, replace(load, queries_per_day=told["break_even_queries_per_day"]), RATES)
    assert even["saved_per_month"] == pytest.approx(even["storage_cost_per_month"])
    uses = told["break_even_queries_per_day"] * 30 * told["tokens_per_query"] / load.tokens
    assert told["break_even_uses_per_token_and_month"] == pytest.approx(uses)
    assert even["days_to_repay_compiling"] is None or even["days_to_repay_compiling"] > 1e6, "nothing is left to repay it with"
    busy = plan(EIGHT, replace(load, queries_per_day=4 * told["break_even_queries_per_day"]), RATES)
    gained = (busy["saved_per_month"] - busy["storage_cost_per_month"]) / 30
    assert busy["days_to_repay_compiling"] == pytest.approx(busy["compile_cost"] / gained)


def test_where_transfer_costs_more_than_prefill_storing_never_pays() -> None:
    told = plan(EIGHT, Load(tokens=1000, queries_per_day=1e6), replace(RATES, gb_transferred=10.0))
    assert told["break_even_queries_per_day"] is None
    assert told["saved_per_month"] < 0


def test_without_rates_money_is_unknown() -> None:
    told = plan(EIGHT, Load(tokens=1000, queries_per_day=1), Rates())
    assert told["storage_cost_per_month"] is told["compile_cost"] is told["break_even_queries_per_day"] is None


@pytest.mark.parametrize(
    ("config", "said"),
    [({}, "num_hidden_layers"), ({"num_local_experts": 8}, "num_local_experts"), ({"kv_lora_rank": 512}, "kv_lora_rank")],
)
def test_a_model_that_the_formulae_do_not_fit_is_refused(config: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_shape(config, "x")


def test_a_model_that_is_not_there_is_one_line_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Llama-3\.1-8B"):
        shape_of("nope")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        shape_of(str(tmp_path))


def test_a_raw_codec_stores_a_byte_for_a_byte_and_an_unknown_one_is_refused() -> None:
    assert codec_ratio("raw", EIGHT) == 1.0
    with pytest.raises(UserError, match="raw"):
        codec_ratio("zip", EIGHT)


def test_a_transform_codec_is_planned_for_before_any_model_has_a_basis() -> None:
    ratios = [codec_ratio(name, EIGHT) for name in ("int8", "int4", "transform", "transform8")]
    assert ratios == sorted(ratios, reverse=True)
    assert 0.19 < ratios[2] < 0.25, "a step of 0.35 deviations of normal numbers: 3.6 bits of 16"
