"""What storing a model's KV takes and saves, from the model's shape alone. Pure functions; docs/economics.md explains them.

Sources. KV bytes per token: two tensors a layer of kv_heads x head_dim (Ainslie et al., "GQA", 2023). Forward FLOPs: 2 per
weight and token (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1) plus attention, which for each
layer, head and pair of tokens is a product with K and one with V: 4 x head_dim (Chowdhery et al., "PaLM", 2022, appendix B),
over the causal half of the pairs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from storage.errors import UserError
from storage.policy.rules import Rates

GB = 1e9
DAY, MONTH, HOUR = 86400.0, 30 * 86400.0, 3600.0
TOKEN_ID_BYTES = 4
SPEED_AT = 1024  # prompt tokens at which a prefill speed is meant
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped heads and a gated feed-forward layer (Llama, Qwen2, Mistral and their kin)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool  # input and output embeddings are one
    qkv_bias: bool = False
    dtype_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers, as the model computes them."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_weights(self) -> int:
        """Weights that each token is multiplied with: all but embeddings, norms and biases."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """All numbers of the model."""
        biases = self.layers * self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        norms = (2 * self.layers + 1) * self.hidden
        return self.block_weights + biases + norms + self.vocabulary * self.hidden * (1 if self.tied else 2)


PRESETS: Mapping[str, Shape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Shape("embedded", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
            Shape("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, tied=True, qkv_bias=True),
            Shape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, tied=False, qkv_bias=True),
            Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, tied=False),
        )
    }
)


def shape_of(model: str) -> Shape:
    """A preset, or the shape in a folder's config.json. Raises UserError."""
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{model!r} is neither a model folder with a config.json nor one of {', '.join(PRESETS)}") from None
    except ValueError:
        raise UserError(f"{path} is not JSON") from None
    return read_shape(config, Path(model).name)


def read_shape(config: Mapping[str, Any], name: str) -> Shape:
    """The shape that a Hugging Face config describes. Raises UserError for one that these formulae do not fit."""
    experts = {"num_experts", "num_local_experts", "n_routed_experts"} & config.keys()
    latent = {"kv_lora_rank"} & config.keys()
    if experts or latent:
        field = sorted(experts | latent)[0]
        raise UserError(f"{name} has {field}: its cost does not follow from the formulae of a dense decoder")
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    if missing := [field for field in needed if not isinstance(config.get(field), int)]:
        raise UserError(f"{name}'s config has no {missing[0]}: it is not the config of a decoder of Llama's kind")
    layers, hidden, heads, intermediate, vocabulary = (int(config[field]) for field in needed)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
        dtype_bytes=DTYPE_BYTES.get(dtype, 2),
    )


def object_payload(shape: Shape, tokens: int) -> int:
    """Bytes of a stored chunk's sections under the codec `raw`: token ids and KV. The header comes on top."""
    return tokens * (TOKEN_ID_BYTES + shape.kv_bytes_per_token)


def prefill_flops(shape: Shape, tokens: int, behind: int = 0) -> float:
    """Of reading `tokens` tokens behind `behind` that are there, with the logits of the last one."""
    pairs = tokens * behind + tokens * (tokens + 1) / 2
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return 2.0 * shape.block_weights * tokens + attention + 2.0 * shape.vocabulary * shape.hidden


def prefill_seconds(shape: Shape, tokens: int, tokens_per_s: float) -> float:
    """Of a prompt, at a speed that was measured over SPEED_AT tokens: time goes with FLOPs."""
    return prefill_flops(shape, tokens) / prefill_flops(shape, SPEED_AT) * SPEED_AT / tokens_per_s


@dataclass(frozen=True)
class Load:
    """What is to be stored and asked. `codec_ratio`: stored bytes of a byte of KV. `recomputed`: share of the stored tokens
    that blending computes again. `bandwidth`: bytes per second from the store to one engine."""

    tokens: int
    queries_per_day: float
    chunks_per_query: int = 8
    chunk_tokens: int = 400
    codec_ratio: float = 1.0
    recomputed: float = 0.0
    tokens_per_s: float = 20_000.0
    bandwidth: float = 1e9

    @property
    def tokens_per_query(self) -> int:
        return self.chunks_per_query * self.chunk_tokens


def plan(shape: Shape, load: Load, rates: Rates) -> dict[str, Any]:
    """All figures, SI units, money in the rates' currency; None where the rates do not say.

    A query loads its chunks' KV instead of reading them; what blending computes again is not saved."""
    stored = shape.kv_bytes_per_token * load.codec_ratio
    asked = load.tokens_per_query
    prefill, loading = prefill_seconds(shape, asked, load.tokens_per_s), asked * stored / load.bandwidth
    saved = prefill * (1 - load.recomputed)
    compile_s = load.tokens / load.chunk_tokens * prefill_seconds(shape, load.chunk_tokens, load.tokens_per_s)
    return {
        "model": shape.name,
        "parameters": shape.parameters,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "stored_bytes_per_token": stored,
        "stored_bytes": load.tokens * stored,
        "tokens_per_query": asked,
        "bytes_per_query": asked * stored,
        "mean_bandwidth": load.queries_per_day * asked * stored / DAY,
        "load_seconds": loading,
        "prefill_seconds": prefill,
        "prefill_seconds_saved": saved,
        "bandwidth_to_break_even": asked * stored / saved if saved > 0 else None,
        "compile_seconds": compile_s,
        "gpu_seconds_saved_per_day": load.queries_per_day * saved,
        **_money(load, rates, stored, saved, compile_s),
    }


def _money(load: Load, rates: Rates, stored: float, saved: float, compile_s: float) -> dict[str, Any]:
    """Break-even: below so many queries a day, to store a token costs more than to read it each time."""
    gpu, month = rates.gpu_hour / HOUR, rates.gb_month.get("object", 0.0) / GB
    fetch = load.tokens_per_query * stored * rates.gb_transferred / GB
    gain = saved * gpu - fetch  # of one query
    holding = load.tokens * stored * month
    worth = bool(rates.gpu_hour and month) and gain > 0
    queries = holding / gain * DAY / MONTH if worth else None  # a day, over all that is stored
    return {
        "currency": rates.currency or None,
        "storage_cost_per_month": holding if month else None,
        "compile_cost": compile_s * gpu if gpu else None,
        "saved_per_month": gain * load.queries_per_day * MONTH / DAY if gpu else None,
        "break_even_queries_per_day": queries,
        "break_even_uses_per_token_and_month": queries * load.tokens_per_query * MONTH / DAY / load.tokens if queries else None,
        "days_to_repay_compiling": _days(compile_s * gpu, gain * load.queries_per_day - holding * DAY / MONTH) if worth else None,
    }


def _days(cost: float, gain_per_day: float) -> float | None:
    return cost / gain_per_day if gain_per_day > 0 else None
