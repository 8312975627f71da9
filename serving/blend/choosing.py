"""How a method chooses the tokens that are computed again: the same code for our own buffer and for vLLM's pages.

Imports nothing of the reader: inside vLLM there is none.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from precompute.reader import Reader
    from serving.blend.assembly import Assembly


class Placed(Protocol):
    """Where a prompt's stored KV stands; see `Assembly`. Positions are sorted."""

    @property
    def fresh(self) -> torch.Tensor: ...

    @property
    def stored(self) -> torch.Tensor: ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...

    @property
    def anchors(self) -> torch.Tensor: ...

    @property
    def best(self) -> torch.Tensor: ...

    @property
    def tail_start(self) -> int: ...

    @property
    def plain(self) -> bool: ...


class Probe(Protocol):
    """What a method may learn from the model about a prompt whose stored KV is placed. Generators yield between pieces."""

    layers: int

    def question_attention(self, rows: int, first: int, last: int) -> Generator[None, None, torch.Tensor]:
        """Attention [keys] that the prompt's last `rows` tokens pay in layers [first, last), summed over heads and rows. Only
        that of keys before them is told."""
        ...

    def deviation(self) -> Generator[None, None, torch.Tensor]:
        """Of the stored tokens [stored]: by how much their value vectors at layer 1, computed behind an exact layer 0, differ
        from the stored ones (square of the distance)."""
        ...


def union(*positions: torch.Tensor) -> torch.Tensor:
    """Sorted union of position sets."""
    merged: torch.Tensor = torch.unique(torch.cat(positions))
    return merged


class Choosing:
    """A method that computes all fresh tokens, and of the stored ones those that it chooses."""

    def by_question(self, tokens: int) -> bool:
        """Whether another question might choose other tokens, in a prompt of so many."""
        return False

    def choose(self, placed: Placed, probe: Probe) -> Generator[None, None, torch.Tensor]:
        """Positions of stored tokens to be computed again."""
        raise NotImplementedError

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]:
        """See `methods.Method`."""
        from serving.blend.scatter import ReaderProbe, recompute

        chosen = yield from self.choose(assembly, ReaderProbe(reader, assembly))
        return (yield from recompute(reader, assembly, union(assembly.fresh, chosen)))
