"""Weights that are made of several parameters, and weights that are not written as matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite import Size

WIDTH = 16
INPUTS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
Use = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """A layer, one that is used in a way of its own, and a readout."""

    def __init__(self, width: int, use: Use, extra: tuple[int | None, ...], outputs: int) -> None:
        super().__init__()
        self.width = width
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, outputs, bias=False)
        self.w = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.s = nn.Parameter(torch.ones([size or width for size in extra]))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.first(x).relu())


def build(use: Use, *extra: int | None, outputs: int = 3) -> Any:
    """A network; sizes of its extra parameter that are None are the width."""
    return lambda width, depth: Net(width, use, extra, outputs)


def plain(net: Net, x: Tensor) -> Tensor:
    return net.head(F.linear(x, net.w).relu())


def numbers(made: Any, name: str) -> tuple[float, float]:
    """By which factors a tensor's learning rate and initial size change at 4 times the width."""
    plan = th.plan(made, INPUTS, size=Size(4 * WIDTH, 1), base=Size(WIDTH, 1), lr=1.0)
    base = th.plan(made, INPUTS, size=Size(WIDTH, 1), base=Size(WIDTH, 1), lr=1.0)
    return plan[name].lr, plan[name].init.size / base[name].init.size


def role(made: Any, name: str) -> str:
    return th.dissect(made, INPUTS, size=Size(WIDTH, 1))[name].role


def test_a_product_that_is_summed_is_a_readout() -> None:
    """`(h·v).sum(-1)` is h·v, as in `h @ v`."""
    made = build(lambda net, x: plain(net, x) + (x * net.s).sum(-1, keepdim=True), None)
    assert role(made, "s") == "output"
    assert numbers(made, "s") == (1 / 4, 1 / 4)


def test_a_mean_is_a_sum_with_a_number() -> None:
    made = build(lambda net, x: plain(net, x) + (x * net.s).mean(-1, keepdim=True), None)
    assert role(made, "s") == "output"
    assert numbers(made, "s") == (1, 1)


def test_attention_vectors_of_heads_are_readouts() -> None:
    def use(net: Net, x: Tensor) -> Tensor:
        scores = (x.unflatten(-1, (4, -1)) * net.s[:, : net.width // 4]).sum(-1)
        return plain(net, x * scores.sigmoid().repeat_interleave(net.width // 4, 1))

    assert role(build(use, 4, None), "s") == "output"


def test_a_number_of_the_data_times_a_vector_is_an_input_layer() -> None:
    class Numbers(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.head(x[:, :1] * self.s)

    assert role(lambda width, depth: Numbers(width, plain, (None,), 3), "s") == "input"


def test_a_number_that_was_computed_times_a_vector_is_scaled_by_a_gain() -> None:
    def use(net: Net, x: Tensor) -> Tensor:
        return plain(net, x + x.mean(-1, keepdim=True).sigmoid() * net.s)

    assert role(build(use, None), "s") == "gain"


@pytest.mark.parametrize(
    "use",
    [
        lambda net, x: net.head(F.linear(x, net.w * net.s).relu()),
        lambda net, x: net.head((x @ (net.w * net.s).T).relu()),
    ],
)
def test_of_two_matrices_multiplied_entry_by_entry_one_takes_the_fan_in(use: Use) -> None:
    """`W∘S`: S starts as it is, and its step changes W∘S by `|W| ~ 1/√n` an entry where 1/n is allowed."""
    made = build(use, None, None)
    names = ("s", "w")
    roles = {name: role(made, name) for name in names}
    assert sorted(roles.values()) == ["gain", "hidden"]
    gain = next(name for name in names if roles[name] == "gain")
    (weight,) = {*names} - {gain}
    assert numbers(made, weight) == (1 / 4, pytest.approx(1 / 2))
    assert numbers(made, gain) == (1 / 2, pytest.approx(1))


def test_in_a_readout_of_one_row_too() -> None:
    def use(net: Net, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, net.w).relu(), net.head.weight * net.s)

    made = build(use, 1, None, outputs=1)
    assert role(made, "head.weight") == "output"
    assert role(made, "s") == "gain"
    assert numbers(made, "s") == (1, 1)


def test_two_matrices_that_are_added_are_two_weights() -> None:
    made = build(lambda net, x: net.head(F.linear(x, net.w + net.s).relu()), None, None)
    assert role(made, "w") == role(made, "s") == "hidden"


NORMED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "layer norm": lambda net, w: F.layer_norm(w, w.shape[1:]) * net.width**-0.5,
    "batch norm": lambda net, w: F.batch_norm(
        w[None].mT.mT.flatten(2), None, None, net.s.flatten() * net.width**-0.5, training=True
    )[0],
    "length": lambda net, w: F.normalize(w),
}


@pytest.mark.parametrize("way", NORMED)
def test_a_weight_that_passes_a_norm_is_a_weight(way: str) -> None:
    def use(net: Net, x: Tensor) -> Tensor:
        gain = 1.0 if way == "batch norm" else net.s[:, None]
        return net.head(F.linear(x, gain * NORMED[way](net, net.w)).relu())

    anatomy = th.dissect(build(use, None), INPUTS, size=Size(WIDTH, 1))
    assert (anatomy["w"].role, anatomy["w"].scale_free) == ("hidden", True)
    assert (anatomy["s"].role, anatomy["s"].factor) == ("gain", pytest.approx(1))


def test_a_gain_on_a_direction_of_entries_of_one_takes_the_fan_in() -> None:
    """Nothing else sets the size of `g·N(W)x`, which grows as √n."""

    def use(net: Net, x: Tensor) -> Tensor:
        return net.head(F.linear(x, net.s[:, None] * F.layer_norm(net.w, net.w.shape[1:])).relu())

    assert numbers(build(use, None), "s") == (pytest.approx(1 / 2), pytest.approx(1 / 2))
