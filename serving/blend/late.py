"""Stored KV that is still on its way when the prompt is begun: loading and computing meet.

Objects are asked for from the prompt's end. Computing goes from its start, where a token sees all that stands before it,
and takes chunk after chunk until it meets one that has come. So a prompt is never waited for longer than its own
prefill takes, and a slow source still saves what it can. Jin et al., "Compute Or Load KV Cache? Why Not Both?" (2024).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from precompute.reader import PIECE, Reader
from serving.blend.assembly import Assembly, place_chunk
from serving.blend.scatter import ScatterPass


@dataclass(frozen=True)
class Awaited:
    """A chunk at positions [start, end) of the prompt whose stored KV may yet come. `best`: see `Assembly.best`."""

    number: int  # of the chunk in the prompt
    start: int
    end: int
    best: bool = False


@dataclass
class Late:
    """What is awaited, and what became of it, by the chunk's number in the prompt.

    `arrived()`: the KV [layers, 2, kv_heads, tokens, head_dim] of those that have come since it was last called; None
    for one that will not come."""

    awaited: Sequence[Awaited]
    arrived: Callable[[], Mapping[int, torch.Tensor | None]]
    placed: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def complete(self, reader: Reader, assembly: Assembly) -> Generator[None, None, None]:
        """Place or compute them all; yields between pieces. What a method computes later anyway is left to it: labels, and
        chunks that have no stored KV, behind the last chunk that is computed here."""
        left = {chunk.number: chunk for chunk in sorted(self.awaited, key=lambda chunk: chunk.start)}
        while left:
            for number, kv in self.arrived().items():
                found = left.pop(number, None)  # None: it came too late
                if found is not None and kv is not None:
                    self._place(reader, assembly, found, kv)
            if left:
                chunk = left.pop(next(iter(left)))
                self.computed.append(chunk.number)
                yield from _compute_until(reader, assembly, chunk.end)

    @torch.inference_mode()
    def _place(self, reader: Reader, assembly: Assembly, chunk: Awaited, kv: torch.Tensor) -> None:
        place_chunk(reader, assembly.kv, kv, chunk.start)
        fresh = assembly.fresh
        assembly.fresh = fresh[(fresh < chunk.start) | (fresh >= chunk.end)]
        assembly.spans = sorted([*assembly.spans, (chunk.start, chunk.end)])
        if chunk.best:
            assembly.best = torch.arange(chunk.start, chunk.end, device=reader.device)
        self.placed.append(chunk.number)


def _compute_until(reader: Reader, assembly: Assembly, end: int) -> Generator[None, None, None]:
    """Compute all fresh tokens before `end`. They are exact, if everything before them is."""
    rows = assembly.fresh[assembly.fresh < end]
    assembly.fresh = assembly.fresh[len(rows) :]
    assembly.computed += len(rows)
    for piece in torch.split(rows, PIECE):
        start = int(piece[0])
        if int(piece[-1]) - start + 1 == len(piece):  # as a full prefill goes: so a source that stalls costs its wait alone
            yield from reader.prefill_pieces(assembly.kv, assembly.ids[piece], start, logits=False)
        else:
            reader.forward(assembly.ids[piece], piece, ScatterPass(assembly.kv, piece, reader.query_heads), logits=False)
            yield
