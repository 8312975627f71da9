"""Tiny decoders with random weights, one per model family, saved as real model folders with a real tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
)

from precompute.embedded import embedded_model
from precompute.reader import Reader
from storage.errors import ModelUnsupported
from storage.types import RetrievedChunk

MAX_POSITIONS = 2048
SENTENCES = (
    "The ferry leaves the northern harbour at seven in the morning and returns before dusk.",
    "A season ticket costs forty euros and is valid for the whole of the year.",
    "Answer from the numbered passages below and from nothing else. Name the passage you used by its number.",
    "If they do not hold the answer, say so. Passages: [1] [2] [3] Question: Answer:",
    "Who repairs a device that failed, and how long does it take until it comes back?",
    "Bees keep the hive at thirty-five degrees through the winter by moving their wings.",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,  # large enough that attention is far from even, and a wrong position shows
    "tie_word_embeddings": False,
}


def _partial(config: Any) -> Callable[..., Any]:
    def make(*, head_dim: int, **settings: Any) -> Any:
        return config(**settings, partial_rotary_factor=0.5)

    return make


CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": lambda **k: MistralConfig(**{"sliding_window": None, **k}),
    "gemma": lambda **k: GemmaConfig(**{**k, "head_dim": 32, "num_key_value_heads": 1}),
    "phi": _partial(PhiConfig),
    # Not to be blended:
    "stablelm": _partial(StableLmConfig),
    "cohere": CohereConfig,
    "smollm3": lambda **k: SmolLM3Config(**{**k, "num_hidden_layers": 4}),
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma")


@cache
def backend() -> str:
    """A byte-level BPE trained on a few sentences, as tokenizer.json text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=480, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False),
    )
    return str(tokenizer.to_str())


def save_tokenizer(folder: Path, template: str | None = CHATML) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend()),
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL),
    )
    fast.chat_template = template
    fast.save_pretrained(folder)


def save_model(folder: Path, config: Any, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """A model folder with random weights; equal seeds give equal weights."""
    config.vocab_size = Tokenizer.from_str(backend()).get_vocab_size()
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and "norm" not in name:
                weight.normal_(0, 0.2)  # biases start at zero, which would hide a lost one
    model.save_pretrained(folder)
    save_tokenizer(folder, template)
    return folder


class Models:
    """Model folders and readers by name, each made once per test session."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._readers: dict[tuple[str, str], Reader] = {}

    def folder(self, name: str, family: str = "", **changes: Any) -> Path:
        """The folder `name`; made of `family` (by default the name) with `changes` to its config."""
        folder = self._root / name
        if not (folder / "config.json").exists():
            config = CONFIGS[family or name](**{**COMMON, **changes})
            save_model(folder, config, template=NO_SYSTEM if name == "gemma" else CHATML)
        return folder

    def reader(self, name: str, dtype: str = "float32", **made_of: Any) -> Reader:
        if (name, dtype) not in self._readers:
            folder = self.folder(name, **made_of)
            self._readers[name, dtype] = Reader(folder, dtype=dtype, filler=1)
        return self._readers[name, dtype]


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model's folder, converted once, into the user's cache."""
    try:
        return embedded_model()
    except ModelUnsupported as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Models(tmp_path_factory.mktemp("models"))
    torch.set_num_threads(threads)


def retrieved(number: int, token_ids: Sequence[int], kv_key: str | None = None) -> RetrievedChunk:
    """A chunk as retrieval hands it to the prompt; only its ids and its key matter there."""
    return RetrievedChunk(
        chunk_id=number, document_id="d", corpus_id="c", file_id="f", path="p", version="v", text="", start=0, end=0,
        token_ids=tuple(token_ids), headings=(), page_start=None, page_end=None, line_start=1, line_end=1, score=1.0,
        kv_key=kv_key,
    )  # fmt: skip
