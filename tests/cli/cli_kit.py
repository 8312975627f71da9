"""The command line as a child process, and what is known of a running Preread."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Shell:
    """Runs `preread` with settings of its own."""

    environ: dict[str, str]

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "serving.cli", *words]

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(*words), env=self.environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, done.stderr + done.stdout
        return done

    def json(self, *words: str) -> Any:
        """What a command prints for machines: one value, and nothing beside it."""
        return json.loads(self.run(*words, "--json").stdout)


@dataclass
class Running:
    shell: Shell
    process: subprocess.Popen[str]
    welcome: dict[str, Any]
    data: Path
    sources: Path
