"""A decoder's forward pass in slices: some layers in one step, the next ones in another.

What a layer gets from the one before it is learnt from a pass, since every architecture has its own signature. Where
something else happens between two layers, a pass goes through all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = dict[Any, Any]  # of a layer: its arguments, by place or by name
Fed = dict[Any, int]  # argument → which of the outputs of the layer before it


class _Begun(Exception):
    """Ends a forward pass where its first layer would begin; not an error."""


def learn(layers: Sequence[torch.nn.Module], forward: Callable[[], object]) -> Fed | None:
    """Run `forward`, and say what of a layer's output is the next one's input; None: not all goes from layer to layer alone,
    or the arguments differ."""
    calls: list[Call] = []
    outputs: list[tuple[Any, ...]] = []
    hooks = [layer.register_forward_pre_hook(lambda _, a, k: calls.append(_call(a, k)), with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(lambda _, __, output: outputs.append(_outputs(output))) for layer in layers]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    if len(layers) < 2 or len(calls) != len(layers):
        return None
    found = [_fed(call, before, calls[0]) for before, call in zip(outputs, calls[1:], strict=False)]
    return found[0] if found[0] and all(each == found[0] for each in found) else None


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return {**dict(enumerate(args)), **kwargs}


def _outputs(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _fed(call: Call, before: tuple[Any, ...], first: Call) -> Fed | None:
    fed = {}
    for name, value in call.items():
        number = next((n for n, output in enumerate(before) if output is value), None)
        if number is not None:
            fed[name] = number
        elif name not in first or first[name] is not value:
            return None
    return fed if call.keys() == first.keys() else None


class Slices:
    """One forward pass: `forward` begins it; without `fed` (see `learn`) it is all of it. Not for several threads."""

    def __init__(self, layers: Sequence[torch.nn.Module], fed: Fed | None, forward: Callable[[], object]) -> None:
        self._layers, self._fed, self._forward = layers, fed, forward
        self._call: Call = {}
        self.left = len(layers) or 1

    def advance(self, count: int) -> None:
        """Compute so many layers more."""
        if self._fed is None:
            self._forward()
            self.left = 0
            return
        if self.left == len(self._layers):
            self._call = self._first()
        for layer in self._layers[len(self._layers) - self.left :][:count]:
            places = sorted(name for name in self._call if isinstance(name, int))
            named = {name: value for name, value in self._call.items() if not isinstance(name, int)}
            outputs = _outputs(layer(*(self._call[place] for place in places), **named))
            self._call |= {name: outputs[number] for name, number in self._fed.items()}
            self.left -= 1

    def _first(self) -> Call:
        """What the model gives its first layer."""
        found: Call = {}

        def begun(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.update(_call(args, kwargs))
            raise _Begun

        hook = self._layers[0].register_forward_pre_hook(begun, with_kwargs=True)
        try:
            self._forward()
        except _Begun:
            pass
        finally:
            hook.remove()
        return found
