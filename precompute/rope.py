"""Rotary position embedding, taken from the model's own rotary module, and undone.

A scaled rope type (yarn) multiplies cos and sin by a factor; the model applies it once to q and once to k. Position-free
K is K without rotation and without factor: un-rotating divides by its square, placing applies rotation and factor once.
Source of the rotation: Su et al., RoFormer (2021), in the half-split form of the Llama code base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from storage.errors import ModelUnsupported

# Types whose angle of a position depends on nothing but the position.
POSITION_ONLY = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


class Rope:
    """Rotates K of shape [..., tokens, head_dim] to given positions and back, in fp32."""

    def __init__(self, rotary: Callable[..., Any], max_positions: int, device: torch.device) -> None:
        self._factor = float(getattr(rotary, "attention_scaling", 1.0))
        with torch.no_grad():
            positions = torch.arange(max_positions, device=device)[None]
            probe = torch.zeros(1, dtype=torch.float32, device=device)
            cos, sin = rotary(probe, positions)
        half = cos.shape[-1] // 2
        self._cos, self._sin = cos[0, :, :half].float(), sin[0, :, :half].float()  # [positions, rot_dim / 2]
        self._half = half

    def place(self, k: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Position-free K to K at `positions` [tokens]; result (or `out`) in K's dtype."""
        return self._turn(k, self._cos[positions], self._sin[positions], out)

    def placing(self, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """`place` at these positions, many times."""
        cos, sin = self._cos[positions], self._sin[positions]
        return lambda k: self._turn(k, cos, sin, None)

    def unplace(self, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inverse of `place`."""
        square = self._factor**2
        return self._turn(k, self._cos[positions] / square, -self._sin[positions] / square, None)

    def _turn(self, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        result = torch.empty_like(k) if out is None else out
        first, second = k[..., : self._half].float(), k[..., self._half : 2 * self._half].float()
        result[..., : self._half] = first * cos - second * sin
        result[..., self._half : 2 * self._half] = second * cos + first * sin
        if 2 * self._half < k.shape[-1]:  # partial rotary: the rest carries no position
            result[..., 2 * self._half :] = k[..., 2 * self._half :]
        return result


def rope_type(config: Any) -> str:
    """The rope type by the model's config. Raises ModelUnsupported for one whose angles depend on the context's length."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind not in POSITION_ONLY:
        raise ModelUnsupported(f"rope type {kind!r} depends on the length of the context, so stored K cannot be re-rotated")
    return kind
