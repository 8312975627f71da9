"""Stored KV as it is: only what has no stored KV is computed (labels, missing chunks, the caller's text)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from precompute.reader import Reader
from serving.blend.assembly import Assembly
from serving.blend.methods.arguments import nothing
from serving.blend.scatter import recompute


@dataclass(frozen=True)
class Reuse:
    uses_stored = True
    stored_labels = False

    @classmethod
    def parse(cls, argument: str) -> Reuse:
        nothing(argument)
        return cls()

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]:
        return (yield from recompute(reader, assembly, assembly.fresh))
