"""What the reader computes, what it names it, and which models it leaves to full prefill."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_models import CONFIGS, FAMILIES, NO_SYSTEM, Models, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig

from precompute.passes import ContiguousPass
from precompute.reader import PIECE, Reader
from precompute.spec import LABELS, filler_passages
from storage.errors import Stopping
from storage.fingerprint import weights_fingerprint
from storage.keys import kv_key
from storage.types import KVProfile

MESSY = [3, 3, 250, 17, 90, 90, 41, 8, 100, 33]


def ids_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 400, (length,), generator=generator).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", [*FAMILIES, "phi"])
def test_prefill_equals_the_models_own_forward(family: str, tiny_models: Models) -> None:
    """Across the border between two pieces, and token by token after it."""
    reader = tiny_models.reader(family)
    own = AutoModelForCausalLM.from_pretrained(reader.folder, dtype=torch.float32, attn_implementation="eager")
    ids = ids_of(PIECE + 30)
    with torch.inference_mode():
        expected = own(torch.tensor([ids])).logits[0]
    kv = reader.buffer(len(ids)).fill_(torch.nan)
    logits = reader.prefill(kv, ids[:-2])
    assert logits is not None
    assert torch.allclose(logits, expected[-3], atol=1e-3, rtol=0)
    for at in (len(ids) - 2, len(ids) - 1):
        logits = reader.forward(torch.tensor([ids[at]]), torch.tensor([at]), ContiguousPass(kv, at))
        assert logits is not None
        assert torch.allclose(logits, expected[at], atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_one_chunk_at_a_time(family: str, tiny_models: Models) -> None:
    reader = tiny_models.reader(family)
    batch = [ids_of(n, seed=n) for n in (1, 40, 1, 255, 256, 257)]
    together = reader.compile(batch)
    for ids, kv in zip(batch, together, strict=True):
        assert kv.shape == (reader.layers, 2, reader.kv_heads, len(ids), reader.head_dim)
        assert kv.is_contiguous()
        assert torch.allclose(kv, reader.compile([ids])[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(together[0], reader.compile(batch)[0])


def test_a_compile_ends_at_the_next_layer_when_it_is_told_to(tiny_models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = tiny_models.reader("llama")
    reader.compile([(20, 21, 22)])
    asked = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise Stopping

    monkeypatch.setattr(reader, "check", check)
    with pytest.raises(Stopping):
        reader.compile([(20, 21, 22)])
    assert reader.layers >= len(asked) == 2


def test_a_chunk_is_compiled_behind_frame_filler_and_label(tiny_models: Models) -> None:
    """Its KV is what the whole prefix, read with it, gives it."""
    reader = tiny_models.reader("llama")
    chunk, start = ids_of(50), len(reader.prefix_ids)
    assert reader.prefix_ids[: len(reader.format.frame)] == reader.format.frame
    whole = reader.buffer(start + len(chunk))
    reader.prefill(whole, [*reader.prefix_ids, *chunk])
    positions = torch.arange(start, start + len(chunk))
    compiled = reader.compile([chunk])[0]
    assert torch.allclose(reader.rope.place(compiled[:, 0], positions), whole[:, 0, :, start:], atol=1e-4, rtol=0)
    assert torch.allclose(compiled[:, 1], whole[:, 1, :, start:], atol=1e-4, rtol=0)
    alone = reader.compile_behind(reader.buffer(0), [chunk])[0]
    assert (alone - compiled).abs().max() > 0.1


def test_the_frames_kv_is_that_of_a_prompt(tiny_models: Models) -> None:
    reader = tiny_models.reader("qwen3")
    frame = reader.format.frame
    whole = reader.buffer(len(frame) + 20)
    reader.prefill(whole, [*frame, *ids_of(20)])
    assert torch.allclose(reader.frame_kv(), whole[:, :, :, : len(frame)], atol=1e-4, rtol=0)


# --- names -----------------------------------------------------------------------------------------------------


def profile_of(folder: Path, **settings: Any) -> KVProfile:
    return Reader(folder, **{"dtype": "float32", "filler": 1, **settings}).profile


def key_of(profile: KVProfile) -> str:
    return kv_key(profile, MESSY, "group", b"secret")


def test_other_weights_are_another_model(tiny_models: Models, tmp_path: Path) -> None:
    first = tiny_models.folder("llama")
    same = shutil.copytree(first, tmp_path / "same" / "llama")
    assert profile_of(same) == profile_of(first)
    other = shutil.copytree(first, tmp_path / "other" / "llama")
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1  # one bit of the last number
    weights.write_bytes(data)
    assert profile_of(other).weights != profile_of(first).weights
    assert key_of(profile_of(other)) != key_of(profile_of(first))


def test_weights_that_are_not_safetensors_have_a_fingerprint_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"one")
    first = weights_fingerprint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"two")
    assert weights_fingerprint(tmp_path) != first


def test_another_template_dtype_or_filler_is_another_profile(tiny_models: Models, tmp_path: Path) -> None:
    first = tiny_models.folder("llama")
    other = shutil.copytree(first, tmp_path / "llama")
    save_tokenizer(other, NO_SYSTEM)
    profiles = [profile_of(first), profile_of(other), profile_of(first, dtype="bfloat16"), profile_of(first, filler=2)]
    assert len({key_of(p) for p in profiles}) == 4
    assert profiles[0].tokenizer != profiles[1].tokenizer
    assert profiles[0].conditioning != profiles[3].conditioning


def test_models_whose_names_differ_in_a_separator_never_share_keys(tiny_models: Models) -> None:
    profile = tiny_models.reader("llama").profile
    names = ["a/b", "a_b", "a-b", "a b", "ab", "A/b", "a/b/", "a\\b"]
    assert len({key_of(replace(profile, model=name)) for name in names}) == len(names)


# --- models left to full prefill ----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 32,
}
WINDOWED = {
    "mistral": lambda: CONFIGS["mistral"](**SMALL),
    "gemma2": lambda: Gemma2Config(**SMALL, query_pre_attn_scalar=16),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, query_pre_attn_scalar=16),
    "qwen2": lambda: CONFIGS["qwen2"](**SMALL, use_sliding_window=True, max_window_layers=1),
}


@pytest.mark.parametrize("family", WINDOWED)
def test_a_windowed_model_is_left_to_full_prefill(family: str, tmp_path: Path) -> None:
    reader = Reader(save_model(tmp_path / family, WINDOWED[family]()), dtype="float32")
    assert reader.full_prefill_reason is not None
    assert "sliding" in reader.full_prefill_reason
    assert not hasattr(reader, "profile")


def test_soft_capped_attention_is_left_to_full_prefill(tmp_path: Path) -> None:
    settings = {**SMALL, "sliding_window": None}
    config = Gemma2Config(**settings, layer_types=["full_attention"] * 3, query_pre_attn_scalar=16)
    reader = Reader(save_model(tmp_path / "capped", config), dtype="float32")
    assert reader.full_prefill_reason == "soft-capped attention logits"


def test_rotations_that_differ_by_layer_are_left_to_full_prefill(tmp_path: Path) -> None:
    settings = {**SMALL, "sliding_window": None}
    config = Gemma3TextConfig(**settings, layer_types=["full_attention"] * 3, query_pre_attn_scalar=16)
    reader = Reader(save_model(tmp_path / "layered", config), dtype="float32")
    assert reader.full_prefill_reason is not None
    assert "layer to layer" in reader.full_prefill_reason


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_a_reading_is_the_document_read_from_its_start(family: str, tiny_models: Models) -> None:
    reader = tiny_models.reader(family)
    a, b, c = (tuple(ids_of(n, n)) for n in (20, 30, 25))
    number = next(n for n in range(1, 20) if reader.prefix_ids[-len(reader.format.label(n)) :] == reader.format.label(n))
    ids = [*reader.prefix_ids, *a, *reader.format.label(number + 1), *b, *reader.format.label(number + 2), *c]
    whole = reader.buffer(len(ids))
    reader.prefill(whole, ids)
    found = reader.compile_readings([(a, b), (a, b, c), (b,), (a,)])
    alone = reader.compile([b, a])
    ends = {1: len(reader.prefix_ids) + 20}
    ends[2] = ends[1] + len(reader.format.label(number + 1)) + 30
    ends[3] = ends[2] + len(reader.format.label(number + 2)) + 25
    for kv, count, chunk in ((found[3], 1, a), (found[0], 2, b), (found[1], 3, c)):
        positions = torch.arange(ends[count] - len(chunk), ends[count])
        assert torch.allclose(reader.rope.place(kv[:, 0], positions), whole[:, 0, :, positions], atol=1e-4, rtol=0)
        assert torch.allclose(kv[:, 1], whole[:, 1, :, positions], atol=1e-4, rtol=0)
    assert torch.allclose(found[2], alone[0], atol=1e-5)
    assert not torch.allclose(found[0], alone[0], atol=1e-3)


def test_labels_are_those_of_a_numbered_prompt(tiny_models: Models) -> None:
    reader = tiny_models.reader("llama")
    labels = reader.label_kv()
    assert len(labels) >= 8
    assert [kv.shape[3] for kv in labels[:8]] == [len(reader.format.label(n)) for n in range(1, 9)]
    texts = [reader.tokenizer.encode(p) for p in filler_passages()]
    start = [*reader.format.frame, *reader.format.label(1), *texts[0], *reader.format.label(2)]
    whole = reader.buffer(len(start))
    reader.prefill(whole, start)
    positions = torch.arange(len(start) - len(reader.format.label(2)), len(start))
    assert torch.allclose(reader.rope.place(labels[1][:, 0], positions), whole[:, 0, :, positions], atol=1e-4, rtol=0)
    assert torch.allclose(labels[1][:, 1], whole[:, 1, :, positions], atol=1e-4, rtol=0)
    assert reader.label_kv() is labels  # read once


def test_a_short_context_has_fewer_labels_and_is_not_read_again(tiny_models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(tiny_models.folder("llama"), dtype="float32", filler=1)
    reader.max_positions = 400
    few = reader.label_kv()
    assert 0 < len(few) < LABELS
    monkeypatch.setattr(Reader, "prefill", None)
    assert reader.label_kv() is few
