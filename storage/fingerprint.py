"""What a model's files are, as one word: in every key of stored KV, and compared wherever KV meets a model."""

from __future__ import annotations

import hashlib
from pathlib import Path


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 over every weights file and the config, in name order: any change of weights is another model."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
