"""How a prompt becomes logits and how one more token is added: over our own KV buffer, or by the model's own cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from precompute.passes import ContiguousPass
from precompute.reader import PIECE, Reader
from serving.blend.assembly import Assembly
from serving.blend.late import Late
from serving.blend.methods import Method


class Session(Protocol):
    """One prompt in the model. `start` yields wherever others may have a turn and returns the first logits [vocab]."""

    def start(self) -> Generator[None, None, torch.Tensor]: ...

    def step(self, token: int) -> torch.Tensor: ...


class BlendSession:
    """A blended prompt; decoding goes on in the same buffer, at the same speed as after a full prefill."""

    def __init__(self, reader: Reader, assembly: Assembly, method: Method, late: Late | None = None) -> None:
        """`late`: chunks whose stored KV may come while the prompt is begun."""
        self._reader, self.assembly, self._method, self.late = reader, assembly, method, late
        self._at = assembly.tokens

    def start(self) -> Generator[None, None, torch.Tensor]:
        if self.late is not None:
            yield from self.late.complete(self._reader, self.assembly)
        return (yield from self._method.blend(self._reader, self.assembly))

    def step(self, token: int) -> torch.Tensor:
        position = torch.tensor([self._at], device=self._reader.device)
        ids = torch.tensor([token], device=self._reader.device)
        steering = self.assembly.steering
        kv_pass = ContiguousPass(self.assembly.kv, self._at, steering.bias if steering else None)
        logits = self._reader.forward(ids, position, kv_pass)
        self._at += 1
        assert logits is not None
        return logits


class PlainSession:
    """For models that cannot be blended: full prefill through the model's own attention and cache."""

    def __init__(self, reader: Reader, ids: Sequence[int]) -> None:
        self._reader, self._ids = reader, list(ids)
        self._cache: Any = DynamicCache(config=reader.config)

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor([list(ids)], device=self._reader.device)
        result = self._reader.model(input_ids=tokens, cache=self._cache, use_cache=True, logits_to_keep=1)
        return result.logits[0, -1].float()  # type: ignore[no-any-return]

    def start(self) -> Generator[None, None, torch.Tensor]:
        logits = None
        for at in range(0, len(self._ids), PIECE):
            logits = self._forward(self._ids[at : at + PIECE])
            yield
        assert logits is not None
        return logits

    def step(self, token: int) -> torch.Tensor:
        return self._forward([token])
