"""The basis of a transform codec: data of a model, in an object of its own, named by its content.

Object `basis/<digest>`, digest being the SHA-256 of its bytes in hex: magic `PRBASIS1`; layers, kv_heads and head_dim as
u32; means, fp32 [layers, 2, kv_heads, head_dim]; steps of V, fp32 [layers]; matrices of K, bf16 [layers, kv_heads,
head_dim, head_dim]; all little endian. Row c of a matrix is what component c of K adds to its head's vector per integer.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from storage.codecs.scratch import Scratch

_HEAD = struct.Struct("<8s3I")
_MAGIC = b"PRBASIS1"
MAX_BYTES = 1 << 30
ONES = 3  # rows of the mean: as many bf16 numbers hold all digits of an fp32
_ROWS = 8  # what the tokens are filled up to a multiple of
_CAPABILITIES: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
_BF16_PRODUCTS = bool(_CAPABILITIES.get("avx512_bf16"))
# Integers that 8 bits do not hold: where they stand, ascending, and what they are.
Patches = tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]
NO_PATCHES: Patches = np.empty(0, np.int64), np.empty(0, np.int16)
SLACK = 0.01  # of a step: what rounding in the encoder's own arithmetic may add


@dataclass(frozen=True, eq=False)
class Basis:
    """`means` [layers, 2, kv_heads, head_dim] fp32 of K and V; `steps` [layers] fp32 of V, above zero; `matrices` [layers,
    kv_heads, head_dim, head_dim] bf16 of K."""

    means: torch.Tensor
    steps: torch.Tensor
    matrices: torch.Tensor

    @cached_property
    def digest(self) -> str:
        """64 hex digits that only these numbers have."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The object."""
        layers, _, heads, width = self.means.shape
        numbers = [x.contiguous().view(torch.uint8).numpy().tobytes() for x in (self.means, self.steps, self.matrices)]
        return _HEAD.pack(_MAGIC, layers, heads, width) + b"".join(numbers)

    @staticmethod
    def from_bytes(data: bytes | memoryview, digest: str) -> Basis:
        """Raises ValueError where the bytes are not those of `digest`, or no basis that can be used."""
        if hashlib.sha256(data).hexdigest() != digest or len(data) < _HEAD.size:
            raise ValueError("the bytes are not those of the digest")
        magic, layers, heads, width = _HEAD.unpack_from(data)
        sizes = [4 * layers * 2 * heads * width, 4 * layers, 2 * layers * heads * width * width]
        if magic != _MAGIC or len(data) != _HEAD.size + sum(sizes):
            raise ValueError("no basis")
        buffer = torch.frombuffer(bytearray(data[_HEAD.size :]), dtype=torch.uint8)
        means, steps, matrices = (part.clone() for part in torch.split(buffer, sizes))
        basis = Basis(
            means.view(torch.float32).view(layers, 2, heads, width),
            steps.view(torch.float32),
            matrices.view(torch.bfloat16).view(layers, heads, width, width),
        )
        if not all(bool(part.isfinite().all()) for part in (basis.means, basis.steps, basis.matrices)):
            raise ValueError("a basis with numbers that are none")
        return basis

    @cached_property
    def _inverses(self) -> torch.Tensor:
        inverses: torch.Tensor = torch.linalg.inv(self.matrices.double())
        return inverses.float()

    @cached_property
    def _rows(self) -> torch.Tensor:
        """fp32 [layers, kv_heads, ONES + head_dim, head_dim]: the mean as a sum of bf16 rows, then the matrix: one product adds
        the mean as well, and a product of bf16 numbers is exact."""
        rest, parts = self.means[:, 0].unsqueeze(-2), []
        for _ in range(ONES):
            parts.append(rest.to(torch.bfloat16).float())
            rest = rest - parts[-1]
        return torch.cat([*parts, self.matrices.float()], -2)

    @cached_property
    def _rows_bf16(self) -> torch.Tensor:
        return self._rows.to(torch.bfloat16)

    def k_components(self, k: torch.Tensor, layer: int) -> torch.Tensor:
        """K [kv_heads, tokens, head_dim] in units of steps: fp32 [kv_heads, tokens, components]."""
        return (k.float() - self.means[layer, 0].unsqueeze(-2)) @ self._inverses[layer]

    def v_components(self, v: torch.Tensor, layer: int) -> torch.Tensor:
        """V [kv_heads, tokens, head_dim] in units of steps, fp32, of the same shape."""
        return (v.float() - self.means[layer, 1].unsqueeze(-2)) / self.steps[layer]

    def expand_k(self, x: torch.Tensor, patches: Patches, first: int, out: torch.Tensor, scratch: Scratch) -> None:
        """`out` [layers, kv_heads, tokens, head_dim], the layers from `first` on, from integers `x` int8 [layers, components,
        kv_heads, tokens], in which `patches` say what to put in. Sums are fp32, rounded once: the integers, up to 256, are exact
        in bf16 as well, whose products are taken where the processor has them: twice as fast.

        The product reads its left side transposed, at no cost; a transposition before it would take as long as itself."""
        layers, width, heads, tokens = x.shape
        fast = out.dtype == torch.bfloat16 and _BF16_PRODUCTS
        matrices = (self._rows_bf16 if fast else self._rows)[first : first + layers].flatten(0, 1)
        # Filled up, since the library makes code for each shape it meets, which takes as long as a small chunk.
        filled = -(-tokens // _ROWS) * _ROWS
        rows = scratch.take((layers, heads, ONES + width, filled), matrices.dtype)
        rows[:, :, :ONES] = 1
        rows[:, :, ONES:, :tokens] = x.transpose(1, 2)
        if len(patches[0]):
            layer, component, head, token = np.unravel_index(patches[0], x.shape)
            places = ((layer * heads + head) * (ONES + width) + ONES + component) * filled + token
            rows.view(-1)[torch.from_numpy(places)] = torch.from_numpy(patches[1]).to(rows.dtype)
        product = scratch.take((layers * heads, filled, width), matrices.dtype)
        torch.bmm(rows.flatten(0, 1).transpose(1, 2), matrices, out=product)
        out.copy_(product.view(layers, heads, filled, width)[:, :, :tokens])

    def expand_v(self, x: torch.Tensor, patches: Patches, first: int, out: torch.Tensor, scratch: Scratch) -> None:
        """`out` from integers `x` int8, both [layers, kv_heads, tokens, head_dim], and `patches` as above; rounded once."""
        steps, means = self.steps[first : first + len(x)].view(-1, 1, 1, 1), self.means[first : first + len(x), 1].unsqueeze(-2)
        numbers = scratch.take(x.shape, torch.float32).copy_(x)
        if len(patches[0]):
            numbers.view(-1).numpy()[patches[0]] = patches[1]
        out.copy_(torch.addcmul(means, numbers, steps, out=numbers))

    def holds(self, found: torch.Tensor, layer: torch.Tensor, number: int) -> bool:
        """Whether `found` is within half a step of `layer` in every component, but for the dtype's rounding of `found`."""
        off = found.float() - layer.float()
        rounding = found.float().abs() * torch.finfo(layer.dtype).eps
        inverse = self._inverses[number]
        k_holds = (off[0] @ inverse).abs() <= 0.5 + SLACK + rounding[0] @ inverse.abs()
        v_holds = off[1].abs() <= (0.5 + SLACK) * self.steps[number] + rounding[1]
        return bool(k_holds.all() and v_holds.all())
