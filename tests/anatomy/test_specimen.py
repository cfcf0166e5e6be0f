"""Which branches make a block: those of one element of a list or, without a list, one of each kind."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.anatomy import Anatomy, dissect
from theodolite.core.size import Size


class Mlp(nn.Module):
    """x + f(N x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """x + attention(N x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.f(y, y, y, need_weights=False)[0]


class Layer(nn.Module):
    """Attention, then an MLP in a list of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """An input layer, then modules one after the other, then a readout."""

    def __init__(self, width: int, hold: Callable[[Any, int], Iterable[nn.Module]]) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.order = hold(self, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for module in self.order:
            x = module(x)
        return self.head(x)


def _look(hold: Callable[[Any, int], Iterable[nn.Module]]) -> Anatomy:
    return dissect(lambda w, d: Net(w, hold), torch.zeros(2, 5, 6), size=Size(16, 2))


def _places(anatomy: Anatomy) -> list[tuple[int, int]]:
    return [(branch.block, branch.branch) for branch in anatomy.branches]


def _named(net: Any, width: int) -> Iterable[nn.Module]:
    net.first, net.second, net.third = Layer(width), Layer(width), Layer(width)
    return (net.first, net.second, net.third)


def _listed(net: Any, width: int) -> Iterable[nn.Module]:
    net.layers = nn.ModuleList(Layer(width) for _ in range(3))
    return tuple(net.layers)


def _staged(net: Any, width: int) -> Iterable[nn.Module]:
    net.stages = nn.ModuleList([nn.Sequential(Layer(width), Layer(width)), nn.Sequential(Layer(width))])
    return tuple(net.stages)


def _two_lists(net: Any, width: int) -> Iterable[nn.Module]:
    net.attentions = nn.ModuleList(Attention(width) for _ in range(3))
    net.mlps = nn.ModuleList(Mlp(width) for _ in range(3))
    return tuple(part for pair in zip(net.attentions, net.mlps, strict=True) for part in pair)


def _pairs(net: Any, width: int) -> Iterable[nn.Module]:
    net.layers = nn.ModuleList(nn.ModuleList([Attention(width), Mlp(width)]) for _ in range(3))
    return tuple(part for pair in net.layers for part in pair)


@pytest.mark.parametrize(
    "hold", [_named, _listed, _staged, _two_lists, _pairs], ids=lambda hold: hold.__name__.strip("_")
)
def test_three_transformer_layers_are_three_blocks_wherever_they_are_held(hold: Any) -> None:
    assert _places(_look(hold)) == [(block, branch) for block in range(3) for branch in range(2)]


def test_elements_of_a_list_are_blocks_though_they_differ() -> None:
    """A hybrid: a list whose elements are each one branch, of one kind or the other."""

    def hold(net: Any, width: int) -> Iterable[nn.Module]:
        net.layers = nn.ModuleList([Mlp(width), Attention(width), Mlp(width), Attention(width)])
        return tuple(net.layers)

    assert _places(_look(hold)) == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_two_branches_of_one_kind_in_one_element_are_one_block() -> None:
    """MLP-Mixer's layers, and Conformer's with its two halves of an MLP."""

    def hold(net: Any, width: int) -> Iterable[nn.Module]:
        net.layers = nn.ModuleList(Twice(width) for _ in range(2))
        return tuple(net.layers)

    class Twice(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.two = Mlp(width), Mlp(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    assert _places(_look(hold)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_skip_around_the_whole_body_is_no_branch() -> None:
    """EDSR: x + conv(blocks(x)) around blocks that are residual themselves."""

    class Edsr(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
            self.body = nn.ModuleList(
                nn.Sequential(
                    nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
                )
                for _ in range(depth)
            )
            self.after = nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = y = self.first(x)
            for block in self.body:
                y = y + 0.1 * block(y)
            return self.last(x + self.after(y))

    anatomy = dissect(Edsr, torch.zeros(1, 3, 8, 8), size=Size(8, 3))
    assert [(b.block, b.branch, b.layers) for b in anatomy.branches] == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    assert [b.ends[0] for b in anatomy.branches] == [f"body.{n}.2.weight" for n in range(3)]
    assert anatomy["after.weight"].branch is None
    assert anatomy.grown_blocks == 6


def test_a_network_is_built_at_twice_the_depth_once_and_only_for_who_asks() -> None:
    built: Counter[tuple[int, int]] = Counter()

    def build(width: int, depth: int) -> nn.Module:
        built[width, depth] += 1
        return nn.Sequential(nn.Linear(4, width), *(Mlp(width) for _ in range(depth)), nn.Linear(width, 2))

    anatomy = dissect(build, torch.zeros(2, 4), size=Size(8, 3))
    assert built == {(8, 3): 1, (16, 3): 1}
    assert (anatomy.num_blocks, anatomy.grown_blocks, anatomy.grown_blocks) == (3, 6, 6)
    assert built == {(8, 3): 1, (16, 3): 1, (8, 6): 1}
    assert pickle.loads(pickle.dumps(dissect(build, torch.zeros(2, 4), size=Size(8, 3)))).grown_blocks == 6


def test_sums_of_what_the_blocks_say_are_no_branches() -> None:
    """WaveNet: each block adds to the stream, and by another map to a sum that alone is read out."""

    class WaveNet(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(6, width, 1), nn.Conv1d(2 * width, 3, 1)
            self.dilated = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(depth))
            self.onward = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
            self.skip = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            x, said = self.first(x), 0
            for dilated, onward, skip in zip(self.dilated, self.onward, self.skip, strict=True):
                y = torch.tanh(dilated(x))
                said, x = said + skip(y), x + onward(y)
            return self.last(torch.relu(said))

    anatomy = dissect(WaveNet, torch.zeros(1, 6, 8), size=Size(16, 4))
    for number in range(3):  # nothing reads what the last block adds to the stream
        assert anatomy[f"onward.{number}.weight"].ends_branch
        assert anatomy[f"dilated.{number}.weight"].block == anatomy[f"onward.{number}.weight"].block == number
        assert anatomy[f"onward.{number}.weight"].branch_layers == 2
    assert not any(anatomy[f"skip.{number}.weight"].ends_branch for number in range(4))
