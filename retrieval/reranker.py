"""Texts by how well each answers a query: a second, closer look at what a search has found."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from storage.errors import UserError
from storage.types import TextEmbedder

BATCH = 16


class Reranker(Protocol):
    @property
    def name(self) -> str: ...

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """One score for each text, from 0 to 1: more is better. Comparable within one call only."""
        ...


class CrossEncoderReranker:
    """A cross-encoder of sentence-transformers in a folder: query and text are read together. Threads may share it;
    nothing is loaded before first use. Weights are read as safetensors only."""

    def __init__(self, folder: str, device: str = "cpu", dtype: str = "float32") -> None:
        path = Path(folder)
        if not (path / "config.json").exists() or not list(path.glob("*.safetensors")):
            raise UserError(f"{folder!r} is not a folder of a cross-encoder with a config.json and safetensors weights.")
        self._folder, self._device, self._dtype = path, device, dtype
        self._lock = threading.Lock()
        self.name = path.name

    @cached_property
    def _model(self) -> Any:
        """Callers hold the lock."""
        import torch
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(
            str(self._folder),
            device=self._device,
            local_files_only=True,
            activation_fn=torch.nn.Sigmoid(),
            model_kwargs={"use_safetensors": True, "dtype": self._dtype},
        )
        if model.num_labels != 1:
            raise UserError(f"{str(self._folder)!r} gives {model.num_labels} scores for a text; a reranker gives one.")
        return model

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        if not texts:
            return []
        pairs = [(query, text) for text in texts]
        with self._lock:
            found = self._model.predict(pairs, batch_size=BATCH, show_progress_bar=False, convert_to_numpy=True)
        return [float(score) for score in np.nan_to_num(found.astype("f4"))]


class CosineReranker:
    """The embedder's cosine, where there is no cross-encoder; its name says so. A negative cosine counts as 0."""

    def __init__(self, embedder: TextEmbedder) -> None:
        self._embedder = embedder
        self.name = f"cosine:{embedder.identity}"

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        if not texts:
            return []
        asked, *others = np.asarray(self._embedder.embed([query, *texts]))
        return [float(score) for score in np.clip(np.asarray(others) @ asked, 0.0, 1.0)]
