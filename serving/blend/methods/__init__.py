"""Blending methods by name. To add one: a file with a frozen dataclass that has `blend`, and a line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch

from serving.blend.choosing import Placed, Probe
from serving.blend.methods.cacheblend import CacheBlend
from serving.blend.methods.default import Default
from serving.blend.methods.epic import Epic
from serving.blend.methods.full import Full
from serving.blend.methods.question import Question
from serving.blend.methods.reuse import Reuse
from storage.errors import UserError

if TYPE_CHECKING:
    from precompute.reader import Reader
    from serving.blend.assembly import Assembly


class Method(Protocol):
    """Turns an assembly into a complete KV buffer and the logits of the prompt's last token [vocab], fp32.

    A generator: it yields wherever other requests may have a turn."""

    uses_stored: bool  # False: the prompt is computed whole, and no stored KV is fetched
    stored_labels: bool  # True: the labels' KV is placed like a chunk's; False: labels are computed

    def blend(self, reader: Reader, assembly: Assembly) -> Generator[None, None, torch.Tensor]: ...

    def by_question(self, tokens: int) -> bool: ...

    def choose(self, placed: Placed, probe: Probe) -> Generator[None, None, torch.Tensor]:
        """Positions of stored tokens to be computed again, where something else than a reader computes."""
        ...


METHODS: MappingProxyType[str, Callable[[str], Method]] = MappingProxyType(
    {
        "default": Default.parse,
        "full": Full.parse,
        "reuse": Reuse.parse,
        "epic": Epic.parse,
        "cacheblend": CacheBlend.parse,
        "question": Question.parse,
    }
)


def parse_method(text: str) -> Method:
    """`full`, `reuse`, `epic:K`, `cacheblend:R`, `question:R` or `default`. Raises UserError that lists them."""
    name, _, argument = text.partition(":")
    try:
        return METHODS[name](argument)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"unknown method {text!r}: use default, full, reuse, epic:K (tokens), cacheblend:R or question:R (0 < R <= 1)"
        ) from error

