"""Clients whose pins are not ours live in an environment of their own, build/clients, which `make clients` makes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from promised import missing

HOME = Path(__file__).parents[2] / "build" / "clients"


def program(name: str) -> Path:
    """A program of that environment; skips where there is none."""
    found = HOME / "bin" / name
    if not found.exists():
        missing("clients", f"{name} is not installed: run `make clients`")
    return found


def run(name: str, *arguments: str, key: str, cwd: Path, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """Run it against a service with this key, without any network."""
    environment = {**os.environ, "OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "LMCACHE_DISABLE_BANNER": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(program(name)), *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=seconds
    )


def tokenizer_only(model: Path, folder: Path) -> Path:
    """The model's tokenizer under its name, in a form that older releases of transformers read too."""
    made = folder / model.name
    made.mkdir()
    (made / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    settings: dict[str, Any] = json.loads((model / "tokenizer_config.json").read_text())
    settings = {name: value for name, value in settings.items() if isinstance(value, str | int | bool)}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("config.json", "chat_template.jinja"):
        if (model / name).exists():
            (made / name).write_bytes((model / name).read_bytes())
    return made
