"""The model's own numbers, unchanged. Error bound: none, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Raw:
    """Little-endian elements in the dtype of the profile; writing and reading are views, not copies."""

    name: str = "raw"

    def encode(self, layer: torch.Tensor, number: int = 0) -> memoryview:
        """The tensor's own memory."""
        return layer.view(torch.uint8).reshape(-1).numpy().data

    def decode(
        self,
        sections: Sequence[torch.Tensor],
        dtype: torch.dtype,
        layer_shape: tuple[int, int, int, int],
        first: int = 0,
    ) -> torch.Tensor:
        """One strided view over all sections, which lie at equal distances because they are equally long."""
        length = math.prod(layer_shape) * dtype.itemsize
        if any(section.numel() != length for section in sections):
            raise ValueError("a section is not as long as its layer")
        start = sections[0].storage_offset()
        step = sections[1].storage_offset() - start if len(sections) > 1 else length
        offsets = range(start, start + step * len(sections), step)
        if any(section.storage_offset() != offset for section, offset in zip(sections, offsets, strict=True)):
            raise ValueError("the sections are not equally spaced")
        span = sections[0].as_strided(((len(sections) - 1) * step + length,), (1,)).view(dtype)
        inner = torch.empty(layer_shape, dtype=dtype, device="meta").stride()
        return span.as_strided((len(sections), *layer_shape), (step // dtype.itemsize, *inner))
