"""Linear layers in bfloat16 whose weights lie as oneDNN's kernels read them.

Of a plain layer oneDNN brings the weights into that order at each call, which for a question of a few words takes as long as a
third of the products. `torch.compile` packs them too, by the same operators, but needs a compiler where it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self._bias = plain.bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), None)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, "none", [], "")
        return outputs


def pack(model: nn.Module, compute: Callable[[], Tensor]) -> None:
    """Pack the model's linear layers, if what it computes stays the same to the bit; else leave it as it was.

    `compute` has the model compute something.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype is torch.bfloat16 and child.weight.device.type == "cpu"
    ]
    if not places:
        return
    with torch.inference_mode():
        expected = compute()
        try:
            for parent, name, plain in places:
                setattr(parent, name, PackedLinear(plain))
            same = torch.equal(compute(), expected)
        except Exception as error:  # noqa: BLE001 - no operators or no kernels here, or a model that asks for its layers' weights
            log.info("linear layers are not packed: %s", type(error).__name__)
            same = False
    if not same:
        for parent, name, plain in places:
            setattr(parent, name, plain)
