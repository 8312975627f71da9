"""A blend's passes beside other answers: how many rows and layers there are in a step. vLLM is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from serving.connector.layers import Slices, learn
from serving.connector.timed import SHARE, Timed

WIDTH, LAYERS = 8, 6


class Layer(nn.Module):
    """As vLLM's decoders have them: what is added is carried beside, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        residual = hidden.clone() if residual is None else residual.add_(hidden)
        return torch.tanh(self.inner(residual) + positions[:, None]), residual


class Named(Layer):
    """Another signature: one tensor, and names."""

    def forward(self, *, hidden: torch.Tensor, positions: torch.Tensor) -> Any:  # type: ignore[override]
        return hidden + torch.tanh(self.inner(hidden) + positions[:, None])


class Decoder(nn.Module):
    def __init__(self, kind: Callable[[], Layer], between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embed, self.between = nn.Embedding(50, WIDTH), between
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))
        self.last: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(ids) * 3.0, None
        for layer in self.layers:
            hidden = self.between(hidden)
            if isinstance(layer, Named):
                hidden = layer(hidden=hidden, positions=positions)
            else:
                hidden, residual = layer(positions, hidden, residual)
        return hidden


IDS, POSITIONS = torch.arange(5), torch.arange(5) / 10


def seen(model: Decoder) -> tuple[list[torch.Tensor], list[Any]]:
    """What each layer puts out from now on."""
    found: list[torch.Tensor] = []

    def note(_: Any, __: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).clone())

    return found, [layer.register_forward_hook(note) for layer in model.layers]


@pytest.mark.parametrize("kind", [Layer, Named])
@pytest.mark.parametrize("sizes", [[1] * LAYERS, [2, 3, 1], [LAYERS], [4, 100]])
@torch.inference_mode()
def test_a_pass_in_slices_gives_each_layer_what_the_whole_one_does(kind: Callable[[], Layer], sizes: list[int]) -> None:
    torch.manual_seed(1)
    model = Decoder(kind)
    layers, other = list(model.layers), torch.flip(IDS, (0,))
    fed = learn(layers, lambda: model(other, POSITIONS))
    assert fed is not None
    found, hooks = seen(model)
    model(IDS, POSITIONS)
    whole = found.copy()
    found.clear()
    slices = Slices(layers, fed, lambda: model(IDS, POSITIONS))
    done = 0
    for size in sizes:
        slices.advance(size)
        done = min(LAYERS, done + size)
        assert (len(found), slices.left) == (done, LAYERS - done)
        for hook in hooks:
            hook.remove()
        model(other, POSITIONS)  # others' pass, in between
        for layer, hook in zip(layers, hooks, strict=True):
            layer._forward_hooks[hook.id] = lambda _, __, output: found.append(
                (output[0] if isinstance(output, tuple) else output).clone()
            )
    assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True))
    assert not any(layer._forward_pre_hooks for layer in layers)


@torch.inference_mode()
def test_where_something_happens_between_layers_a_pass_is_whole() -> None:
    model = Decoder(Layer, between=lambda hidden: hidden * 2)
    layers = list(model.layers)
    assert learn(layers, lambda: model(IDS, POSITIONS)) is None
    found, _ = seen(model)
    slices = Slices(layers, None, lambda: model(IDS, POSITIONS))
    slices.advance(1)
    assert (len(found), slices.left) == (LAYERS, 0)


# --- how much in a step --------------------------------------------------------------------------------------------------


class Paged:
    """`base` seconds for the weights of all layers, and `row` for each row, by a clock of its own."""

    layers, piece, tokens, sliced = 10, 512, 2048, True

    def __init__(self, base: float, row: float) -> None:
        self.base, self.row, self.now = base, row, 0.0
        self.advanced: list[tuple[int, int]] = []  # rows and layers

    def open(self, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *_: Any) -> OnePass:
        assert int(positions[-1]) // 16 < len(table)
        return OnePass(self, len(ids))

    def sum_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return values


class OnePass:
    def __init__(self, model: Paged, rows: int) -> None:
        self.model, self.rows, self.left = model, rows, model.layers

    def advance(self, count: int) -> None:
        count = min(count, self.left)
        self.model.now += (self.model.base + self.rows * self.model.row) * count / self.model.layers
        self.left -= count
        self.model.advanced.append((self.rows, count))


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Paged:
    return clocked(Paged(0.2, 0.01), monkeypatch)


def clocked(model: Paged, monkeypatch: pytest.MonkeyPatch) -> Paged:
    monkeypatch.setattr("serving.connector.timed.time", SimpleNamespace(perf_counter=lambda: model.now))
    return model


def measured(model: Paged) -> Timed:
    timed = Timed(model)
    timed.measure(16, torch.device("cpu"))
    model.advanced.clear()
    return timed


def steps(timed: Timed, rows: int, *hooks: Any) -> Iterator[None]:
    ids = torch.arange(rows)
    return timed.run(ids, ids, torch.arange(64), *hooks)


def test_alone_a_pass_is_whole_and_tells_the_speed_of_prefill(paged: Paged) -> None:
    timed = measured(paged)
    assert timed.piece == 512
    timed.tokens_per_s = None
    assert len(list(steps(timed, 100, None, lambda *_: None))) == 0
    assert timed.tokens_per_s is None, "a pass that is watched may end early"
    assert len(list(steps(timed, 100))) == 0
    assert paged.advanced == [(100, 10), (100, 10)]
    assert timed.tokens_per_s == pytest.approx(100 / 1.2)


def test_beside_others_a_step_has_as_many_layers_as_take_a_share_of_theirs(paged: Paged) -> None:
    """A whole pass of 64 rows takes 0.84 s, a step of theirs 0.5 s."""
    timed = measured(paged)
    speed = timed.tokens_per_s
    timed.beside, timed.step_s = 4, 0.5
    assert len(list(steps(timed, 64))) == 4
    assert paged.advanced == [(64, 2)] * 5  # 0.168 s of 0.175
    assert timed.tokens_per_s == speed, "others' steps were between"
    timed.step_s = 5.0
    assert len(list(steps(timed, 64))) == 0
    timed.step_s = 0.001
    assert len(list(steps(timed, 128))) == 9, "a layer in each step at least"
    paged.advanced.clear()
    timed.step_s = 0.5
    list(steps(timed, 64, None, lambda *_: None))
    assert paged.advanced == [(64, 1)] * 10, "looking at layers takes time too"


def test_beside_others_a_pass_has_as_many_rows_as_one_layer_computes_in_that_time(paged: Paged) -> None:
    timed = measured(paged)
    sizes = {}
    timed.beside = 2
    for timed.step_s in (0.5, 1.0, 100.0, 0.001):
        sizes[timed.step_s] = timed.piece
    assert sizes == {0.5: 128, 1.0: 256, 100.0: 256, 0.001: 32}, "more than 256 were not timed: a layer of them takes too long"
    timed.step_s = None
    assert timed.piece == 32, "until a step of theirs is known it is that of so many rows"
    timed.beside = 200
    assert timed.piece == 256, "a step that reads a prompt takes long by itself"


def test_where_a_pass_is_whole_it_has_as_many_rows_as_cost_about_what_one_does(paged: Paged) -> None:
    """A row takes 0.21 s, four 0.24, eight 0.28."""
    paged.sliced = False
    timed = measured(paged)
    timed.beside, timed.step_s = 2, 0.5
    assert timed.piece == 4
    timed.step_s = 1.0
    assert timed.piece == 8, "0.35 s are left"


def test_prefill_speed_is_known_before_the_first_prompt_and_the_pass_that_warms_is_not_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cold(Paged):
        ran = 0

        def open(self, ids: torch.Tensor, *given: Any) -> OnePass:
            self.now += 0 if self.ran else 100
            self.ran += 1
            return super().open(ids, *given)

    timed = measured(clocked(Cold(0.001, 0.001), monkeypatch))
    assert timed.tokens_per_s == pytest.approx(512 / 0.513)


def test_the_share_is_what_the_goal_leaves() -> None:
    assert 1 + SHARE <= 1.5
