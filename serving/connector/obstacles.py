"""What the connector does not blend, each with its reason: then vLLM computes every prompt in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage.errors import UserError

SUPPORTED = "0.32."  # the versions of vLLM begin with this
# Rotations whose angles depend on the position alone, by the name of vLLM's class.
ROPES = frozenset({"RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding"})


def check_start(version: str, failure_policy: str) -> None:
    """Raises UserError where vLLM is not to be started with the connector at all."""
    if not version.startswith(SUPPORTED):
        raise UserError(f"Preread's connector is made for vLLM {SUPPORTED}x, and this is vLLM {version}: install that one.")
    if failure_policy != "recompute":
        raise UserError('Preread\'s connector needs "kv_load_failure_policy": "recompute" in --kv-transfer-config.')


def obstacle(config: Any, kv_cache_config: Any) -> str:
    """Why nothing can be blended with this vllm_config and kv_cache_config, or an empty text."""
    parallel, model = config.parallel_config, config.model_config
    if parallel.pipeline_parallel_size > 1:
        return "With pipeline parallelism no rank has all layers: prompts are computed in full."
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "With context parallelism no rank has all of a prompt's KV: prompts are computed in full."
    if model.use_mla:
        return "The model's KV is latent (MLA), and stored KV is not: prompts are computed in full."
    if config.cache_config.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        return f"vLLM's KV cache is {config.cache_config.cache_dtype}, and stored KV is not: prompts are computed in full."
    if config.speculative_config is not None:
        return "A draft model needs KV of its own, which is not stored: prompts are computed in full."
    if getattr(model, "uses_mrope", False) or model.is_multimodal_model:
        return "The model's positions are not those of a text: prompts are computed in full."
    return kv_cache_obstacle(kv_cache_config)


def kv_cache_obstacle(kv_cache_config: Any) -> str:
    """The same of the pages alone."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec).__name__ != "FullAttentionSpec":
        return "Some layers see a window or keep another state than KV: prompts are computed in full."
    spec = groups[0].kv_cache_spec
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        return "Layers see a sliding window: prompts are computed in full."
    return ""


def rope_obstacle(rotaries: Sequence[Any]) -> str:
    """The same of the model's rotary modules."""
    if len(rotaries) != 1:
        return f"The model has {len(rotaries)} rotations of K, not one: prompts are computed in full."
    name = type(rotaries[0]).__name__
    if name not in ROPES or not rotaries[0].is_neox_style:
        return f"Its rotation, {name}, is none that moves K by position alone: prompts are computed in full."
    return ""
