"""The basis of a transform codec: data of a model, in an object of its own, named by its content.

Object `basis/<digest>`, digest being the SHA-256 of its bytes in hex: magic `PRBASIS1`; layers, kv_heads and head_dim as
u32; means, fp32 [layers, 2, kv_heads, head_dim]; matrices, bf16 [layers, 2, kv_heads, head_dim, head_dim]; all little
endian. Row c of a matrix is what component c adds to the head's vector per integer step.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import torch

_HEAD = struct.Struct("<8s3I")
_MAGIC = b"PRBASIS1"
MAX_BYTES = 1 << 30
SLACK = 0.01  # of a step: what rounding in the encoder's own arithmetic may add


@dataclass(frozen=True, eq=False)
class Basis:
    """`means` [layers, 2, kv_heads, head_dim] fp32, `matrices` [layers, 2, kv_heads, head_dim, head_dim] bf16."""

    means: torch.Tensor
    matrices: torch.Tensor

    @cached_property
    def digest(self) -> str:
        """64 hex digits that only these numbers have."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The object."""
        layers, _, heads, width = self.means.shape
        numbers = [x.contiguous().view(torch.uint8).numpy().tobytes() for x in (self.means, self.matrices)]
        return _HEAD.pack(_MAGIC, layers, heads, width) + b"".join(numbers)

    @staticmethod
    def from_bytes(data: bytes | memoryview, digest: str) -> Basis:
        """Raises ValueError where the bytes are not those of `digest`, or no basis that can be used."""
        if hashlib.sha256(data).hexdigest() != digest or len(data) < _HEAD.size:
            raise ValueError("the bytes are not those of the digest")
        magic, layers, heads, width = _HEAD.unpack_from(data)
        rows = layers * 2 * heads * width
        if magic != _MAGIC or len(data) != _HEAD.size + 4 * rows + 2 * rows * width:
            raise ValueError("no basis")
        buffer = torch.frombuffer(bytearray(data[_HEAD.size :]), dtype=torch.uint8)
        means = buffer[: 4 * rows].clone().view(torch.float32).view(layers, 2, heads, width)
        matrices = buffer[4 * rows :].clone().view(torch.bfloat16).view(layers, 2, heads, width, width)
        if not bool(means.isfinite().all() and matrices.isfinite().all()):
            raise ValueError("a basis with numbers that are none")
        return Basis(means, matrices)

    @cached_property
    def _inverses(self) -> torch.Tensor:
        inverses: torch.Tensor = torch.linalg.inv(self.matrices.double())
        return inverses.float()

    @cached_property
    def _rows(self) -> torch.Tensor:
        """bf16 [layers, 2, kv_heads, 2 + head_dim, head_dim]: the mean in two parts, then the matrix, so that one product
        adds the mean as well, to 16 bits."""
        high = self.means.to(torch.bfloat16)
        low = (self.means - high.float()).to(torch.bfloat16)
        return torch.cat([high.unsqueeze(-2), low.unsqueeze(-2), self.matrices], -2)

    @cached_property
    def _wide_rows(self) -> torch.Tensor:
        return self._rows.float()

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In what products are taken for a result of `dtype`: bf16 where that is all it holds, else fp32."""
        return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32

    def components(self, layer: torch.Tensor, number: int) -> torch.Tensor:
        """A layer [2, kv_heads, tokens, head_dim] in units of steps: fp32 [2, kv_heads, tokens, components]."""
        return (layer.float() - self.means[number].unsqueeze(-2)) @ self._inverses[number]

    def integers(self, layer: torch.Tensor, number: int) -> torch.Tensor:
        """The rounded components, fp32 [2, components, kv_heads, tokens]."""
        return self.components(layer, number).round_().permute(0, 3, 1, 2).contiguous()

    def expand(self, x: torch.Tensor, number: int, which: int, out: torch.Tensor) -> None:
        """`out` [kv_heads, tokens, head_dim] from integers `x` [2 + components, kv_heads, tokens], the first two rows 1."""
        rows = self._rows if x.dtype == torch.bfloat16 else self._wide_rows
        matrix, x = rows[number, which, :, : x.shape[0]], x.permute(1, 2, 0)
        if x.dtype == out.dtype:
            torch.bmm(x, matrix, out=out)
        else:
            out.copy_(torch.bmm(x, matrix))

    def holds(self, found: torch.Tensor, layer: torch.Tensor, number: int) -> bool:
        """Whether `found` is within half a step of `layer` in every component, but for the dtype's rounding of `found`."""
        off = ((found.float() - layer.float()) @ self._inverses[number]).abs()
        rounding = torch.finfo(layer.dtype).eps * (found.float().abs() @ self._inverses[number].abs())
        return bool((off <= 0.5 + SLACK + rounding).all())
