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

    def encode(self, layer: torch.Tensor) -> memoryview:
        """The tensor's own memory."""
        return layer.view(torch.uint8).reshape(-1).numpy().data

    def decode(
        self, sections: Sequence[torch.Tensor], dtype: torch.dtype, layer_shape: tuple[int, int, int, int]
    ) -> torch.Tensor:
        """One strided view over all sections, which lie at equal distances because they are equally long."""
        length = math.prod(layer_shape) * dtype.itemsize
        if any(section.numel() != length for section in sections):
            raise ValueError("a section is not as long as its layer")
        first = sections[0]
        step = sections[1].storage_offset() - first.storage_offset() if len(sections) > 1 else length
        offsets = range(first.storage_offset(), first.storage_offset() + step * len(sections), step)
        if any(section.storage_offset() != offset for section, offset in zip(sections, offsets, strict=True)):
            raise ValueError("the sections are not equally spaced")
        span = first.as_strided(((len(sections) - 1) * step + length,), (1,)).view(dtype)
        inner = torch.empty(layer_shape, dtype=dtype, device="meta").stride()
        return span.as_strided((len(sections), *layer_shape), (step // dtype.itemsize, *inner))
