"""KV between stored objects and vLLM's pages: one rank's share of the heads, K rotated to its place. Torch only.

A layer's pages are a tensor [blocks, kv_heads, block, 2 * head_dim] whose inside depends on the backend: token-major on CUDA, on
the CPU K column by column and V behind it. Which one it is, is found by writing through the backend and reading back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from precompute.rope import Rope

Views = tuple[torch.Tensor, torch.Tensor]  # K and V, each [blocks, kv_heads, block, head_dim]


class PagedLayer(Protocol):
    """One attention layer's pages on this rank."""

    pages: torch.Tensor

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k, v [tokens, kv_heads, head_dim] at `slots` [tokens], by the backend's own kernel."""
        ...


def _token_major(pages: torch.Tensor) -> Views:
    dim = pages.shape[3] // 2
    return pages[..., :dim], pages[..., dim:]


def _column_major(pages: torch.Tensor) -> Views:
    blocks, heads, block, double = pages.shape
    dim = double // 2
    halves = pages.view(blocks, heads, 2, block * dim)
    k = halves[:, :, 0].view(blocks, heads, dim, block).transpose(2, 3)
    return k, halves[:, :, 1].view(blocks, heads, block, dim)


LAYOUTS: tuple[Callable[[torch.Tensor], Views], ...] = (_token_major, _column_major)


def find_layout(layer: PagedLayer, block: int) -> Callable[[torch.Tensor], Views] | None:
    """The layout that reads back what the layer's backend has written, or None. To be called before anything is in the pages."""
    blocks, heads, _, double = layer.pages.shape
    if blocks < 3 or layer.pages.shape[2] != block:
        return None
    generator = torch.Generator().manual_seed(0)
    tokens = block + block // 2  # a whole block, and one that is not full
    k, v = (torch.randn(tokens, heads, double // 2, generator=generator).to(layer.pages) for _ in range(2))
    positions, table = torch.arange(tokens, device=layer.pages.device), torch.tensor([2, 1], device=layer.pages.device)
    layer.write(k, v, slots_of(positions, table, block))
    found = None
    for layout in LAYOUTS:
        try:
            views = layout(layer.pages)
        except RuntimeError:  # strides that do not allow this view
            continue
        if all(torch.equal(_read(view, positions, table, block), given) for view, given in zip(views, (k, v), strict=True)):
            found = layout
    layer.pages[1:3] = 0
    return found


def slots_of(positions: torch.Tensor, table: torch.Tensor, block: int) -> torch.Tensor:
    """Where the tokens at `positions` lie, `table` [blocks] being their prompt's pages."""
    return table[positions // block] * block + positions % block


def _read(view: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, block: int) -> torch.Tensor:
    return view[table[positions // block], :, positions % block]


@dataclass(frozen=True)
class Heads:
    """A rank's share: [first, first + count) of all KV heads. With more ranks than heads, some have the same ones."""

    first: int
    count: int

    @classmethod
    def of(cls, rank: int, ranks: int, all_heads: int) -> Heads:
        return cls(rank * all_heads // ranks, max(1, all_heads // ranks))


class Pages:
    """All layers of one rank. Positions are of a prompt, whose blocks `table` [blocks] names."""

    def __init__(
        self, layers: Sequence[PagedLayer], layout: Callable[[torch.Tensor], Views], rope: Rope, heads: Heads, block: int
    ) -> None:
        self.layers, self.rope, self.heads, self.block = layers, rope, heads, block
        self._views = [layout(layer.pages) for layer in layers]

    @property
    def device(self) -> torch.device:
        return self.layers[0].pages.device

    def slots(self, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return slots_of(positions, table, self.block)

    def place(self, some: Sequence[tuple[torch.Tensor, int]], table: torch.Tensor) -> None:
        """Write objects' KV [layers, 2, kv_heads, tokens, head_dim], free of position, each at its position. A layer of all of
        them at once: what is made on the way to the pages is small enough to stay in a processor's cache."""
        first, last = self.heads.first, self.heads.first + self.heads.count
        positions = torch.cat([torch.arange(at, at + kv.shape[3], device=self.device) for kv, at in some])
        slots, turn = self.slots(positions, table), self.rope.placing(positions)
        for number, layer in zip(range(len(some[0][0])), self.layers, strict=True):
            k, v = (torch.cat([kv[number, which, first:last] for kv, _ in some], 1).to(self.device) for which in range(2))
            layer.write(turn(k).transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous(), slots)

    def put(self, kv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
        """Write KV of this rank's heads as it is, K at its position."""
        slots, tokens_first = self.slots(positions, table), kv.transpose(2, 3)
        for layer, each in zip(self.layers, tokens_first, strict=True):
            layer.write(each[0].contiguous(), each[1].contiguous(), slots)

    def take(self, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """A copy of what is there [layers, 2, kv_heads of this rank, tokens, head_dim], K at its position."""
        both = [torch.stack([_read(view, positions, table, self.block) for view in views]) for views in self._views]
        return torch.stack(both).transpose(2, 3).contiguous()

    def values(self, layer: int, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """V of one layer [tokens, kv_heads, head_dim]."""
        return _read(self._views[layer][1], positions, table, self.block)

    def keys(self, layer: int, tokens: int, table: torch.Tensor) -> torch.Tensor:
        """K of one layer, of positions [0, tokens): [kv_heads, tokens, head_dim]."""
        blocks = self._views[layer][0][table[: -(-tokens // self.block)]]
        return blocks.transpose(0, 1).flatten(1, 2)[:, :tokens]
