"""What a reader model is without its weights: tokenizer, prompt format, shape, and the profile of the KV it writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from precompute.frame import PromptFormat
from precompute.rope import rope_type
from precompute.tokenizer import ReaderTokenizer
from storage.conditioning import Reading, rows
from storage.errors import ModelUnsupported
from storage.fingerprint import weights_fingerprint
from storage.types import KVProfile

LABELS = 24  # whose KV is kept ready; those of further passages are computed with the prompt
DEFAULT_FILLER = 4  # passages before a chunk when it is compiled; see BENCHMARKS.md


class ReaderSpec:
    """A model folder as far as prompts and KV keys need it. `Reader` adds the weights.

    `full_prefill_reason` is None when chunks' KV may be blended; otherwise it says why not, and `profile` is not used."""

    def __init__(
        self, folder: Path, *, dtype: str = "bfloat16", codec: str = "raw", filler: int = DEFAULT_FILLER
    ) -> None:
        self.folder = folder
        self.name = folder.name
        self.tokenizer = ReaderTokenizer(folder)
        self.format = PromptFormat(self.tokenizer)
        self.config = config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.full_prefill_reason = blending_obstacle(config)
        self.max_positions = int(config.max_position_embeddings)
        self.layers = int(config.num_hidden_layers)
        self.query_heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.stop_ids = frozenset(_end_tokens(_generation(folder, config).eos_token_id, self.tokenizer))
        self.codec_named: Callable[[str], str] = str  # as a profile has it; see calibration.use_codec
        self._passages = len(filler_passages()[:filler])
        if not self.full_prefill_reason:
            self.prefix_ids = self._prefix_tokens(filler)
            self.profile = self._profile(dtype, codec, filler)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has."""
        return int(self.config.get_text_config().vocab_size)

    def _prefix_tokens(self, filler: int) -> list[int]:
        ids = list(self.format.frame)
        passages = filler_passages()[:filler]
        for number, passage in enumerate(passages, 1):
            ids += self.format.label(number) + self.tokenizer.encode(passage)
        return ids + self.format.label(len(passages) + 1)

    def _profile(self, dtype: str, codec: str, filler: int) -> KVProfile:
        digest = hashlib.sha256(repr(self.prefix_ids).encode()).hexdigest()[:32]
        return KVProfile(
            model=self.name, weights=weights_fingerprint(self.folder), tokenizer=self.tokenizer.fingerprint,
            frame=self.format.frame_hash, conditioning=f"filler:{filler}:{digest}", codec=codec, dtype=dtype,
            layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim,
        )  # fmt: skip

    def stored_as(self, codec: str | None) -> KVProfile:
        """The profile of KV that a rule has stored with another codec, one of CODEC_NAMES; None: with the reader's own.
        Raises StorageUnavailable where its basis cannot be had."""
        return self.profile if codec is None else replace(self.profile, codec=self.codec_named(codec))

    def behind_prefix(self, reading: Reading) -> tuple[list[int], list[int]]:
        """What is read behind `prefix_ids`: a reading's chunks with labels between them, and where each chunk ends."""
        ids: list[int] = []
        ends = []
        for number, chunk in enumerate(reading, self._passages + 1):
            ids += [*(self.format.label(number) if ids else ()), *chunk]
            ends.append(len(ids))
        return ids, ends

    def label_prompt(self, most: int) -> tuple[list[int], list[tuple[int, int]]]:
        """A prompt of numbered passages, in which labels' KV is read, since so they stand in every prompt: its ids, `most` at
        most, and where the first LABELS labels stand in it, [start, end); fewer where it ends before."""
        texts = [self.tokenizer.encode(passage) for passage in filler_passages()]
        ids, spans = list(self.format.frame), []
        for number in range(1, LABELS + 1):
            label = self.format.label(number)
            spans.append((len(ids), len(ids) + len(label)))
            ids += [*label, *texts[(number - 1) % len(texts)]]
        return ids[:most], [span for span in spans if span[1] <= most]

    def fits(self, reading: Reading) -> bool:
        """Whether it can be read behind frame and filler within the model's context."""
        return len(self.prefix_ids) + rows(reading) <= self.max_positions


def _generation(folder: Path, config: Any) -> Any:
    """What the folder says of how answers end; where it says nothing, the config does, as in transformers."""
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return GenerationConfig.from_model_config(config)


def _end_tokens(configured: int | list[int] | None, tokenizer: ReaderTokenizer) -> set[int]:
    ids = {configured} if isinstance(configured, int) else set(configured or ())
    return ids | ({tokenizer.template.eos_token_id} - {None})


def blending_obstacle(config: Any) -> str | None:
    """Why this model's state cannot be placed and recomputed token by token, or None."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"layers of type {', '.join(sorted(kinds - {'full_attention'}))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding-window attention"
    if getattr(config, "attn_logit_softcapping", None):
        return "soft-capped attention logits"
    if getattr(config, "max_position_embeddings", None) is None or not hasattr(config, "rope_parameters"):
        return "no rotary position embedding"
    if any(isinstance(value, dict) for value in (config.rope_parameters or {}).values()):
        return "rotations that differ from layer to layer"
    try:
        rope_type(config)
    except ModelUnsupported as error:
        return str(error)
    return None


def filler_passages() -> list[str]:
    """Neutral passages that stand before a chunk when it is compiled, so that it does not take itself for the first."""
    return (Path(__file__).parent / "filler.txt").read_text(encoding="utf-8").strip().split("\n\n")
