"""A prompt's KV buffer, put together from stored chunks: what is filled, and what has yet to be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from precompute.reader import Reader


@dataclass(frozen=True)
class Segment:
    """A run of prompt tokens. `kv`: position-free stored KV [layers, 2, kv_heads, tokens, head_dim], or None: to be
    computed. `kind`: frame | label | chunk | tail."""

    kind: str
    ids: tuple[int, ...]
    kv: torch.Tensor | None = None


@dataclass
class Assembly:
    """`kv` [layers, 2, kv_heads, capacity, head_dim] holds rotated K; slots nobody wrote are NaN.

    ids [tokens]; `spans`: [start, end) of every chunk with stored KV, in prompt order; `fresh`: positions without KV;
    `tail_start`: where the caller's text begins."""

    kv: torch.Tensor
    ids: torch.Tensor
    fresh: torch.Tensor
    spans: list[tuple[int, int]]
    tail_start: int
    recomputed_token_layers: int = 0

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[0])

    @property
    def stored(self) -> torch.Tensor:
        """Positions of all tokens with stored KV."""
        device = self.ids.device
        runs = [torch.arange(a, b, device=device) for a, b in self.spans]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long, device=device)


@torch.inference_mode()
def assemble(reader: Reader, segments: Sequence[Segment], extra: int) -> Assembly:
    """Place every stored chunk at its position: one rotation per chunk, all layers at once. `extra`: slots for the answer."""
    total = sum(len(s.ids) for s in segments)
    kv = reader.buffer(total + extra)
    ids = torch.tensor([i for s in segments for i in s.ids], device=reader.device)
    fresh: list[torch.Tensor] = []
    spans: list[tuple[int, int]] = []
    at = tail_start = 0
    for segment in segments:
        end = at + len(segment.ids)
        if segment.kind == "tail":
            tail_start = at
        if segment.kind == "frame":
            kv[:, :, :, at:end] = reader.frame_kv()
        elif segment.kv is None:
            kv[:, :, :, at:end] = torch.nan
            fresh.append(torch.arange(at, end, device=reader.device))
        else:
            place_chunk(reader, kv, segment.kv, at)
            spans.append((at, end))
        at = end
    kv[:, :, :, total:] = torch.nan
    return Assembly(kv, ids, torch.cat(fresh), spans, tail_start)


def place_chunk(reader: Reader, kv: torch.Tensor, chunk: torch.Tensor, at: int) -> None:
    """Write a chunk's position-free KV into the buffer at position `at`."""
    end = at + chunk.shape[3]
    positions = torch.arange(at, end, device=reader.device)
    reader.rope.place(chunk[:, 0], positions, out=kv[:, 0, :, at:end])
    kv[:, 1, :, at:end] = chunk[:, 1]
