"""Folders for what was fetched from elsewhere, for as long as a source is read."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

STALE_SECONDS = 24 * 3600.0  # longer than any listing takes: a worker that died left it behind


def fresh_folder(scratch: Path) -> Path:
    """An empty folder of the caller's own, after those have gone that nobody is using any more."""
    scratch.mkdir(parents=True, exist_ok=True)
    for old in scratch.iterdir():
        if old.stat().st_mtime < time.time() - STALE_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(dir=scratch))
